"""Planner (`lightning-decentral plan`): forecasts of all methods on a measured network, side by side.

`candidates` are what is compared, `compare` does it, `variations` on other clusters, `show` and `report` say it;
`block_profile` and `network` measure a model and a network. Below: `plan`. Nothing here is public beside the
commands.
"""
