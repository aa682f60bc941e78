"""Runs of combinations that nobody wrote down: a generator, invariants that know nothing of the package's arithmetic,
and a search for the smallest run that still fails.

`space` says what a run may be, `probe` is what is trained and what happens to it, `run` is one run in its workers,
`pool` the processes, `verdict` the invariants, `search` draws, covers and shrinks. By hand:

    python -m tests.together 300            # runs of seed 0, a line for each that fails, with its smallest form
    python -m tests.together 300 --seed 7
    python -m tests.together --case '...'   # one again, as printed
"""
