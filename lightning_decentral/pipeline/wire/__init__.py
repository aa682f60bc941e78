"""Exchange and measurement between stages: activations and their gradients, costs, who owns which parameter.

Nothing here is public: all serves the strategy.
"""
