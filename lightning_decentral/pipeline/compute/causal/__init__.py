"""Causal language models of `transformers`, cut along blocks and tokens: where their parts are, and a trial of the cut.

Public: `trial.adapted` and `trial.judged`; all else serves the strategy."""
