"""Blocks that live on the host and compute on a device: prefetch, recomputation, memory accounting, optimizer offload.

Public: the updates of `update`; all else serves the strategy.
"""
