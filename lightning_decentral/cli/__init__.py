"""The commands of `lightning-decentral`: plan, profile, placement, topology, schedule, cuts, lobby; a network meter.

`main` reads the command line. Each other module is one command (`planning` is `plan`), except `gang_schedule`, a
part of `schedule`, and `network`, which torchrun starts: `torchrun ... -m lightning_decentral.cli.network`. Only the
commands are public."""
