"""Hydra configuration: one YAML is one constructor call, a group is a parameter (`pkg://lightning_decentral.conf`)."""
