"""Predicts what pays before it is trained: forecasts of all methods on a measured network (`lightning-decentral plan`).

`candidates` are what is compared, `compare` does it, also on other clusters, `show` prints it;
`block_profile` and `network` measure a model and a network. Below: `plan`. Public: the commands, and `placement` and
`host_links` of `plan`.
"""
