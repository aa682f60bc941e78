"""The generators' states: of all that were used, and of no device that wasn't."""

import pytest
import torch

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.worker_state import random_state, set_random_state


def test_a_device_that_nobody_used_isnt_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker couldn't, where the process that forked it has."""

    def start() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", start)
    assert random_state()["cuda"] == []


def test_devices_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    states, given = [torch.zeros(2), torch.ones(2)], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    set_random_state(random_state())
    assert given == [states]


def test_draws_go_on_where_the_state_was_taken() -> None:
    state = random_state()
    first = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), first)
