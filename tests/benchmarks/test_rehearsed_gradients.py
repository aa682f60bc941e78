"""What a whole rehearsal is counted by."""

import time
from collections.abc import Iterator

import pytest
import torch

from rehearse import gradients


class Worker:
    """Whose step computes for a while."""

    def training_step(self, seconds: float) -> float:
        begun = time.process_time()
        while time.process_time() - begun < seconds:
            pass
        return seconds


@pytest.fixture
def counted() -> Iterator[dict[str, float]]:
    before, found = Worker.training_step, gradients.seconds
    gradients.count(Worker, "training_step")
    found["training_step"] = 0.0
    yield found
    Worker.training_step = before  # type: ignore[method-assign]
    found["training_step"] = 0.0


def test_steps_that_train_are_counted_and_return_what_they_did(counted: dict[str, float]) -> None:
    worker = Worker()
    assert [worker.training_step(0.02), worker.training_step(0.03)] == [0.02, 0.03]
    assert counted["training_step"] >= 0.05


def test_validations_are_not(counted: dict[str, float]) -> None:
    with torch.no_grad():
        Worker().training_step(0.02)
    assert counted["training_step"] == 0.0
