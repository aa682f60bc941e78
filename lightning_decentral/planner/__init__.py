"""Predicts which training method is fastest: forecasts of all methods on a measured network, for the command `plan`.

`candidates` lists the methods to compare, `compare` compares them, also on other clusters, `show` prints the result;
`block_profile` and `network` measure a model and a network. Below: `plan`. Public: the commands, and `placement` and
`host_links` of `plan`."""
