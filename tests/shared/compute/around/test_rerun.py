"""What a second run finds: generators, numbers and containers as before the first, and afterwards as behind it."""

import random
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_decentral.shared.compute.around.rerun import Remembered

pytestmark = pytest.mark.quick


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.count, self.rows = torch.Generator().manual_seed(1), 0, [1, [2]]
        self.last: deque[int] = deque([1, 2], maxlen=2)
        self.known, self.seen, self.fresh = {"a": {"b": 1}}, {1}, [0]
        self.kept = torch.zeros(())

    def forward(self) -> Any:
        self.count += 1
        self.rows[1].append(self.count)  # type: ignore[union-attr]
        self.last.append(self.count)
        self.known["a"]["b"] += self.count
        self.seen.add(self.count + 5)
        self.fresh = [*self.fresh, self.count]
        self.kept = self.kept + 1
        self.made = getattr(self, "made", 0) + 1
        return self.state()

    def state(self) -> Any:
        drawn = random.random(), float(np.random.rand()), float(torch.rand((), generator=self.own))
        held = repr((self.rows, self.last, self.known, sorted(self.seen), self.fresh, vars(self).get("made")))
        return drawn, self.count, held, float(self.kept)


def test_a_second_run_is_the_first_and_leaves_no_trace() -> None:
    behind = []
    for again in (False, True):
        module = Everything()
        random.seed(1)
        np.random.seed(1)
        remembered = Remembered(module)
        first = module()
        if again:
            with remembered.again():
                assert module() == first
        behind.append(module.state())
    assert behind[0] == behind[1]
    assert module.last.maxlen == 2


def test_an_error_in_the_second_run_leaves_no_trace_either() -> None:
    module = Everything()
    remembered = Remembered(module)
    module()
    counted, numbers = module.count, random.getstate()
    with suppress(KeyError), remembered.again():
        module()
        raise KeyError
    assert (module.count, random.getstate()) == (counted, numbers)
