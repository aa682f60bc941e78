"""How unequally fast the workers are: relative seconds of computation, drawn from what was measured.

    factor[run, step, worker] ~ variation,  independent

Every method is judged by the same draws, so that their differences aren't those of the draws.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RUNS = 24
WARM_STEPS = 16  # until waves of waiting have spread as far as they will, with delays up to as many
COUNTED_STEPS = 64


def even(workers: int, steps: int = WARM_STEPS + COUNTED_STEPS) -> Floats:
    """All equally fast in every step: [1, steps, workers]."""
    return np.ones((1, steps, workers))


def drawn(variation: Sequence[float], workers: int, runs: int = RUNS, seed: int = 0) -> Floats:
    """[runs, steps, workers]; even where nothing was measured."""
    if not variation:
        return even(workers)
    shape = runs, WARM_STEPS + COUNTED_STEPS, workers
    return np.random.default_rng(seed).choice(np.asarray(variation, dtype=np.float64), shape)


def one_slow(factor: float, workers: int, steps: int, runs: int = 1, seed: int = 0) -> Floats:
    """[runs, steps, workers]: in each step one worker, at random, takes `factor` times as long as the others."""
    factors = np.ones((runs, steps, workers))
    slow = np.random.default_rng(seed).integers(workers, size=(runs, steps, 1))
    np.put_along_axis(factors, slow, factor, axis=2)
    return factors
