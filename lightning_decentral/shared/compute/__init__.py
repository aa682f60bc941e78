"""Tensor and module arithmetic that all methods use: flat buckets, device clocks, random state, chains of blocks.

Nothing here is public."""
