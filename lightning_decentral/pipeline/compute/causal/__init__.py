"""Causal language models of `transformers`, cut along blocks and tokens: their anatomy, and a trial that admits them.

Public: nothing but what `trial.adapted` and `trial.judged` tell; all else serves the strategy.
"""
