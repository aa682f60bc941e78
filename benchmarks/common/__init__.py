"""What all benchmarks share: where results lie, what they were measured on, recipes, the command line."""
