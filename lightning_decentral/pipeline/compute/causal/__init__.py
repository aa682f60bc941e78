"""Causal language models of `transformers`, cut along blocks and tokens: their anatomy, and a trial that admits them.

Begin with `trial.adapted`; serves the strategy.
"""
