"""Plain attributes of a module are put back between two runs of a step."""

import random
from collections import deque

import numpy as np
import torch
from torch import nn

from lightning_decentral.partial.compute.trial import own_state


class Counts(nn.Module):
    """Keeps what a step may change in all the ways that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layers_by_name = {"first": self.layer}
        self.n, self.seen, self.last = 0, [], deque([1], maxlen=3)
        self.draws = [torch.Generator().manual_seed(1)]
        self.numpy, self.python = np.random.default_rng(2), random.Random(3)

    def step(self) -> list[float]:
        self.n += 1
        self.seen.append(self.n)
        self.last.append(self.n)
        self.late = self.n
        return [self.n, *self.seen, *self.last, float(torch.rand(1, generator=self.draws[0])), self.numpy.random(),
                self.python.random()]  # fmt: skip


def test_every_run_meets_the_same_attributes() -> None:
    module = Counts()
    again = own_state(module)
    first = module.step()
    module.step()
    again()
    assert not hasattr(module, "late")
    assert module.step() == first
    again()
    assert module.step() == first
    assert module.layers_by_name["first"] is module.layer
