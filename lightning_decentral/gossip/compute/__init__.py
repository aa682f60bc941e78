"""The arithmetic of gossip on tensors, sends nothing: update rules (`combine`), what links remember, `integrity`.

Codecs are shared with other methods: `shared/compute/codec`. Public: the face of `combine`.
"""
