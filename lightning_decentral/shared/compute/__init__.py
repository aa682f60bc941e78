"""What all methods do with tensors and modules: flat buckets, device clocks, random state, chains of blocks.

Nothing here is public.
"""
