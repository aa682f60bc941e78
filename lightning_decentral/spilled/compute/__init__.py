"""Computation of blocks that live on the host: prefetch, recomputation, memory accounting, optimizer offload.

Public: the updates of `update`; all else serves the strategy.
"""
