"""Communication and measurement between stages: activations and their gradients, costs, ownership of parameters.

Public: the boundaries of `executor` (activations compressed for sending); all else serves the strategy."""
