"""The arithmetic of gossip on tensors, without communication: update rules (`combine`), codec state, healing.

Codecs are shared with other methods: `shared/compute/codec`. Public: the names of `combine`."""
