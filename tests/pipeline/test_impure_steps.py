"""Steps that draw, count, read and write by other means than torch's generator: once, as in one process."""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pipeline.causal import VOCABULARY, token_mean
from tests.pipeline.compute.test_adapters import Perceptron
from tests.pipeline.training import Language, alone, distance, fit, forked, pipeline

SHORT: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 0}


def shifts() -> Iterator[int]:
    """Nothing can put a generator back."""
    yield from range(100)


class Impure(Language):
    """Each step's tokens depend on draws, counts and what is read; each of them advances once a step."""

    def __init__(self) -> None:
        super().__init__("llama", sgd=True)
        self.own, self.count, self.queue = torch.Generator().manual_seed(3), 0, deque([1, 5, 2])
        self.known: dict[str, list[int]] = {"shifts": []}
        self.read: Any = None

    def on_train_start(self) -> None:
        random.seed(11)
        np.random.seed(12)
        self.read = shifts()

    def shift(self) -> int:
        self.count += 1
        self.queue.rotate()
        drawn = random.randrange(9) + int(np.random.randint(9)) + int(torch.randint(9, (), generator=self.own))
        self.known["shifts"].append(drawn + next(self.read) + self.count * self.queue[0])
        return self.known["shifts"][-1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, _ = batch
        ids = (ids + self.shift()) % VOCABULARY
        labels = ids.flip(0) if random.random() < 0.5 else ids
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        self.log("shift", float(self.known["shifts"][-1]))
        return token_mean(logits, labels.masked_fill(mask == 0, -100))


def test_whatever_a_step_does_before_its_call_is_done_once(tmp_path: Path) -> None:
    wanted, losses, metrics = fit(Impure(), alone(), tmp_path / "alone", **SHORT)
    found, found_losses, found_metrics = forked(Impure(), pipeline(2), tmp_path / "p", **SHORT)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-8
    assert found_metrics == pytest.approx(metrics, rel=1e-9)


class Behind(Language):
    """Draws behind its call of the model, where one stage alone runs, what the next step uses before it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch
        ids = (ids + random.randrange(50)) % VOCABULARY
        loss = token_mean(self.model(input_ids=ids, attention_mask=mask).logits, labels)
        return loss * (1 + random.random())


def test_what_only_one_stage_has_drawn_is_not_blamed_on_the_batches(tmp_path: Path) -> None:
    words = "training_step gives LlamaForCausalLM different inputs on two stages from the same batch, because"
    with pytest.raises(RuntimeError, match=words):
        forked(Behind("llama"), pipeline(2), tmp_path, **SHORT)


class Before(Perceptron):
    """With a layer that is trained in front of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.front = torch.nn.Linear(8, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.front(batch[0]), *batch[1:]], batch_idx)


def test_layers_in_front_of_the_model_would_not_be_trained(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"ValueError: training_step gives \w+ inputs that need gradients, a pipeline"
    ):
        forked(Before(), pipeline(2, slicing=None), tmp_path, **SHORT)


class Sampled(Language):
    """Evaluates at tokens that it draws, from other numbers on each stage."""

    def on_validation_start(self) -> None:
        random.seed(self.global_rank)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = (batch[0] + random.randrange(50)) % VOCABULARY
        self.log("val", self.model(input_ids=ids).logits.mean())


def test_an_evaluation_that_differs_between_stages_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="an evaluation gives LlamaForCausalLM different inputs on stage 0 and"):
        forked(Sampled("llama"), pipeline(2), tmp_path, max_steps=3)
