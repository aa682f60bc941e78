"""The commands of `lightning-decentral`: plan, profile, network, placement, topology, schedule, cuts.

`main` reads the command line; each other module is one command. Nothing here is public beside the commands.
"""
