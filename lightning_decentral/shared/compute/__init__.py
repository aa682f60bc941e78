"""Tensors and modules, as all methods use them: flat buckets, device clocks, random state, chains of blocks.

Nothing here is public.
"""
