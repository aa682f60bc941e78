"""What stages send each other and measure together: activations and their gradients, costs, who owns which parameter.

Nothing here is public: all serves the strategy.
"""
