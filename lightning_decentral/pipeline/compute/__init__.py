"""Computation of a stage: models cut into stages, KV cache between slices, losses, weight gradients, deferred init.

Public: `stage` (activations kept or recomputed); all else serves the strategy."""
