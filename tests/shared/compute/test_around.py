"""What a second run finds: generators, numbers and containers as before the first, and afterwards as behind it.

Functions of libraries are replaced wherever they were imported to, and come back whole.
"""

import contextvars
import functools
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_decentral.shared.compute.around import Redirected, Remembered

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


def twice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return 2 * original(*args, **kwargs)


def test_a_function_that_was_imported_before_is_replaced_until_close() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    redirected = Redirected(get_total_norm, twice)
    assert float(get_total_norm([torch.ones(4)], norm_type=1.0)) == 8, "defaults and names of arguments stay"
    assert float(clip_grad_norm_([parameter], 100.0)) == 4, "within the library, too"
    redirected.close()
    assert float(get_total_norm([torch.ones(4)])) == 2


def test_one_function_of_a_module_at_a_time_and_others_beside_it() -> None:
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    first = Redirected(grad_norm, lambda original, *args: sorted(original(*args)))
    second = Redirected(torch.nn.Module.named_parameters, lambda original, *args, **kwargs: iter(()))
    assert grad_norm(layer, 2) == []
    with pytest.raises(AssertionError, match="one function of a module at a time"):
        Redirected(torch.nn.Module.named_buffers, twice)
    second.close()
    assert len(grad_norm(layer, 2)) == 3
    first.close()
    assert isinstance(grad_norm(layer, 2), dict)
    assert functools.reduce(lambda n, p: n + p.numel(), layer.parameters(), 0) == 6


def test_each_thread_has_its_own_until_the_last_has_left() -> None:
    def asked() -> float:
        return float(get_total_norm([torch.ones(4)]))

    def thrice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return 3 * original(*args, **kwargs)

    mine = Redirected(get_total_norm, twice)
    with ThreadPoolExecutor(1) as another, ThreadPoolExecutor(1) as none:
        its = another.submit(Redirected, get_total_norm, thrice).result()
        assert (asked(), another.submit(asked).result()) == (4, 6)
        assert none.submit(asked).result() == 6, "the newest, where a thread has none"
        assert none.submit(contextvars.copy_context().run, asked).result() == 4, "which goes on in this one's place"
        mine.close()
        assert (asked(), another.submit(asked).result()) == (6, 6)
        another.submit(its.close).result()
    assert asked() == 2
