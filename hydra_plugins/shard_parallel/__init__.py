"""Hydra finds its plugins by importing all that lies here at the start of every application: nothing heavy."""
