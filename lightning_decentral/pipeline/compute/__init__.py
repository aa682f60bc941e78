"""What a stage computes: models cut into stages, the KV cache between slices, losses, weight gradients, deferred init.

Public: `stage` (activations kept or recomputed) and `activation_codec`; all else serves the strategy.
"""
