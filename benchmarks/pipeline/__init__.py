"""What token pipelines gain, what slicing costs, and which models can be sliced."""
