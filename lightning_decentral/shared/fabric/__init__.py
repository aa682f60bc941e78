"""Fabric: base class of the methods' Fabric strategies, and the checkpoints that a user's loop saves and loads.

Public: nothing; `FabricGossipStrategy` and `FabricCompressedStrategy` derive from these classes.
"""
