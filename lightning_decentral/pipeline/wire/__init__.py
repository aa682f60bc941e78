"""Exchange and measurement between stages: activations and their gradients, costs, who owns which parameter.

Public: the boundaries of `executor` (activations compressed for the wire); all else serves the strategy.
"""
