"""A recipe on a simulated accelerator: it sleeps as long as it says, and all else of it is real."""

import time
from typing import Any

import pytest
import torch

from common.quiet_recipe import built, composed
from network.asleep import blocks_of, costs, put_to_sleep

SMALL = ["recipe=gpt", "model.config.n_embd=16", "model.config.n_layer=2", "model.config.n_head=2", "strategy=auto"]
STEPS, SECONDS = 3, 0.06


def asleep(*words: str, own_update: bool = False) -> tuple[Any, Any, Any]:
    """(data, model, trainer) of a small model on a simulated accelerator."""
    steps = [f"trainer.max_steps={STEPS}", "trainer.max_epochs=-1", "+trainer.limit_val_batches=0"]
    data, model, trainer = built(composed([*SMALL, *steps, *words], 0))
    put_to_sleep(model, SECONDS, own_update)
    return data, model, trainer


def test_a_step_takes_the_accelerators_seconds_and_gives_every_parameter_a_gradient() -> None:
    data, model, trainer = asleep()
    began, busy = time.perf_counter(), time.process_time()
    trainer.fit(model, datamodule=data)
    taken, busy = time.perf_counter() - began, time.process_time() - busy
    assert taken - busy > 0.9 * STEPS * SECONDS, "it computed what it should have slept"
    momenta = [trainer.optimizers[0].state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    assert all(bool((momentum > 0).all()) for momentum in momenta), "a parameter had no gradient"


def test_with_its_own_update_it_steps_by_the_recipes_optimizer_from_gradients_of_full_rank() -> None:
    data, model, trainer = asleep("optimizer=muon", own_update=True)
    trainer.fit(model, datamodule=data)
    assert type(trainer.optimizers[0]).__name__ == "Muon"
    momenta = [
        trainer.optimizers[0].state[weight]["momentum_buffer"]
        for weight in model.network.transformer.h[0].parameters()
        if weight.ndim == 2
    ]
    assert momenta
    assert all(int(torch.linalg.matrix_rank(momentum)) == min(momentum.shape) for momentum in momenta)


def test_what_is_forecast_is_what_sleeps() -> None:
    _, model, _ = asleep()
    blocks = blocks_of(model)
    assert [id(p) for block in blocks for p in block] == [*map(id, model.parameters())], "each once, in their order"
    found = costs(blocks, SECONDS, 0.01)
    assert sum(one.forward_seconds for one in found) == pytest.approx(SECONDS / 3)
    assert sum(one.backward_seconds for one in found) == pytest.approx(SECONDS * 2 / 3)
    assert sum(one.update_seconds for one in found) == pytest.approx(0.01)
    assert sum(one.parameter_bytes for one in found) == sum(p.numel() * 4 for p in model.parameters())
