"""What stages send each other and measure together: activations and their gradients, costs, who owns which parameter.

Public: `cost_cache`; all else serves the strategy.
"""
