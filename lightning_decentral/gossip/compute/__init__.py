"""The arithmetic of gossip on tensors, sends nothing: update rules (`combine`), what a `link` remembers, `healing`.

Codecs are shared with other methods: `shared/compute/codec`. Public: the face of `combine`.
"""
