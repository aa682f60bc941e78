"""Lightning Fabric: base class of this package's Fabric strategies, and checkpoints of a user's own training loop.

Public: nothing; `FabricGossipStrategy` and `FabricCompressedStrategy` derive from these classes."""
