"""A model in stages of one process, one after the other, against the same model whole; both in float64 throughout."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.adapters import find
from lightning_decentral.pipeline.compute.causal.small_copy import Doubled
from lightning_decentral.pipeline.compute.intercept import answering, called
from lightning_decentral.pipeline.compute.model import Pipelined, StagePlace
from lightning_decentral.pipeline.compute.stage import Keep, Stage
from tests.pipeline.causal import Gradients

LENGTH = 13
SLICES = (5, 1, 7)
Ask = Callable[[Any], Tensor]
"""From a model to the loss: a training step."""


def random(model: nn.Module) -> nn.Module:
    """In float64, with weights far enough from their initial ones that attention attends."""
    generator = torch.Generator().manual_seed(0)
    for p in (model := model.double().train()).parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def whole(make: Callable[[], nn.Module], ask: Ask) -> tuple[float, Gradients]:
    """Loss and gradients as `transformers` has them."""
    model = make()
    with Doubled():
        loss = ask(model)
        loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def staged(
    make: Callable[[], nn.Module], ask: Ask, cuts: Sequence[int] = (2,), slices: Sequence[int] = SLICES
) -> tuple[float, Gradients]:
    """The same as a pipeline does it: the step is read, run in stages and slices, and answered."""
    models = [make() for _ in (0, *cuts)]
    found = [find(model) for model in models]
    ends = [0, *cuts, len(found[0].loads()[0])]
    places = [StagePlace(a, b, a == 0, b == ends[-1]) for a, b in pairwise(ends)]
    for own, place in zip(found, places, strict=True):
        own.keep(place)
    with Doubled():
        calls = [called(own, lambda model=model: ask(model)) for own, model in zip(found, models, strict=True)]
        stages = [
            Stage(own, place, [call], slices, Keep()) for own, place, call in zip(found, places, calls, strict=True)
        ]
        loss = _there_and_back(stages, found[-1], models[-1], ask, slices)
    return loss, _summed(make(), models)


def _there_and_back(stages: list[Stage], own: Pipelined, model: nn.Module, ask: Ask, slices: Sequence[int]) -> float:
    for index in range(len(slices)):
        hidden = None
        for stage in stages:
            hidden = stage.forward(0, index, hidden)
    logits = torch.cat(stages[-1].outputs[0], dim=1).requires_grad_()
    with answering(own, lambda call: own.answer(call, logits)):
        loss = ask(model)
    loss.backward()
    for index, grad in reversed(list(enumerate(logits.grad.split(slices, dim=1)))):
        for stage in reversed(stages):
            towards = stage.backward(0, index, grad)
            grad = grad if towards is None else towards
    return loss.item()


def _summed(original: nn.Module, models: list[nn.Module]) -> Gradients:
    """Over stages, tied parameters by their first name."""
    first = {p: n for n, p in original.named_parameters()}
    names = {n: first[p] for n, p in original.named_parameters(remove_duplicate=False)}
    total: Gradients = {}
    for model in models:
        for n, p in model.named_parameters():
            if p.grad is not None:
                known = names[n]
                total[known] = total[known] + p.grad if known in total else p.grad
    return total
