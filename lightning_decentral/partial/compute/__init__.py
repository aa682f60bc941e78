"""Cuts of a network, and what runs below them: search and verification, scaled gradients, frozen parameters.

Public: `frozen_update` and the verification in `cut`; all else serves the strategy."""
