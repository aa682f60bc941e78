"""Cuts of a network, and what runs below them: the search, its proof, gradients scaled, frozen parameters.

Public: `frozen_update` and the verification in `cut`; all else serves the strategy.
"""
