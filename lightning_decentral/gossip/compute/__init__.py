"""The arithmetic of gossip on tensors, sends nothing: update rules (`combine`), compression (`codec`), `integrity`.

Public: the faces of `combine` and `codec`.
"""
