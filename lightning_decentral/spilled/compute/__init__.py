"""Computation of blocks that live on the host: prefetch, recomputation, memory accounting, optimizer offload.

Public: the optimizer updates in `update`; the other modules serve the strategy."""
