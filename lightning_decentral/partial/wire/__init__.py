"""Gradient averages over those who contributed, block by block, overlapped with the backward; the depth of each step.

Nothing here is public."""
