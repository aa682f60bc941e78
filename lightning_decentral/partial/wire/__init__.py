"""The average of gradients over those who contributed them, block by block, overlapped with the backward.

Nothing here is public.
"""
