"""Hydra plugin, imported at the start of every application that uses Hydra: it must import nothing heavy."""
