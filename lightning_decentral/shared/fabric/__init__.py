"""Loops with Fabric: the base of the methods' strategies for it, and the checkpoints that such a loop saves and loads.

Public: nothing; `FabricGossipStrategy` and `FabricCompressedStrategy` are made of these.
"""
