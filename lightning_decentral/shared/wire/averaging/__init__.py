"""Averages of gradients over devices, residuals of compressed averages (error feedback), replicas that stay equal.

Nothing here is public."""
