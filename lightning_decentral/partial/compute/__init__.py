"""Cuts of a network, and what runs below them: the search, its proof, gradients scaled, frozen parameters.

Public: `frozen_update` and `verify`; all else serves the strategy.
"""
