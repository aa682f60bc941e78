"""Where a network can be cut and what runs below a cut: the search, its proof, gradients scaled, frozen parameters.

Public: `frozen_update` and `verify`; all else serves the strategy.
"""
