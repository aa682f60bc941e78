"""Trial of causal language models: a model is sliced only if its small copy gives the same loss and gradients when cut.

    | loss(cut) - loss(whole) |  and  || grad(cut) - grad(whole) || / || grad(whole) ||  below TOLERANCE, in float64

The cut copy has three stages and three slices; it runs on the host, unless torch trains this attention only on a
device. Padded rows, packed rows and router losses have their own trials: a model that differs in one of them is refused
for calls of this kind only."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.anatomy import Anatomy, dissect
from lightning_decentral.pipeline.compute.causal.causal_model import LEFT, PACKING, RIGHT, ROUTING, CausalModel
from lightning_decentral.pipeline.compute.causal.masks import HOST, tried_at
from lightning_decentral.pipeline.compute.causal.refusals import refuse_attention, refuse_compiled, refuse_unsliceable
from lightning_decentral.pipeline.compute.causal.small_copy import Unfit, isolated, small_copy
from lightning_decentral.pipeline.compute.model import StagePlace
from lightning_decentral.pipeline.compute.stage import Keep, Stage

TOLERANCE = 1e-9
FLOOR = 1e-6  # relative to the largest gradient: some gradients are zero but for rounding
BATCH, SLICES = 2, (6, 1, 5)
LENGTH = sum(SLICES)

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of the trial of a small copy of a model."""

    anatomy: Anatomy | None  # None if the model can't be cut at all
    refused: Mapping[str, str]  # the reason, by kind of call, or "" for all calls
    aligned: bool = False  # whether causal biases instead of masks give the same; used for a device's kernels


_known: dict[tuple[type, str], TrialOutcome] = {}
_lock = Lock()


def adapted(module: nn.Module, device: torch.device = HOST) -> CausalModel:
    """Adapt a model so that it can be cut into stages and slices. `device`: the device that trains the model.
    ValueError: a small copy gives other results in slices; the text names the difference."""
    refuse_attention(module, device)
    refuse_unsliceable(module)
    verdict = judged(type(module), vars(module)["config"], device)
    if verdict.anatomy is None:
        raise ValueError(
            f"{type(module).__name__} can't be cut into slices: {verdict.refused['']}; return a Chain from "
            "pipeline_stages() of the LightningModule and use microbatches, or use another strategy"
        )
    refuse_compiled(module, verdict.anatomy)
    return CausalModel(module, verdict.anatomy, verdict.refused, verdict.aligned)


def judged(kind: type, config: Any, device: torch.device = HOST) -> TrialOutcome:
    """Return the outcome for models of this class and configuration; tried once in a process."""
    with _lock, tried_at(config, device) as place:
        key = kind, f"{config.to_json_string(use_diff=False)} {config._attn_implementation} {place.type} {device.type}"
        if key not in _known:
            with isolated(place):
                _known[key] = _try(kind, config, place, device.type == "cuda" and config._attn_implementation == "sdpa")
        return _known[key]


def _try(kind: type, config: Any, place: torch.device, aligned: bool) -> TrialOutcome:
    """Try to cut a small copy; any exception that it raises is the reason why the model can't be cut."""
    try:
        copy = small_copy(kind, config).to(place)
        ids = torch.randint(3, copy.config.vocab_size, (BATCH, LENGTH)).to(place)  # below: special tokens
        ask = {"input_ids": ids, "use_cache": True, **_routing(copy)}
        anatomy = dissect(copy, lambda memory: copy(past_key_values=memory, **ask), LENGTH)
    except Exception as error:
        return TrialOutcome(None, {"": _one_line(error)})
    calls = _calls(copy, ids)
    aligned = aligned and _differs(copy, anatomy, calls[""], aligned=True) is None
    why = None if aligned else _differs(copy, anatomy, calls[""])
    if why is not None:
        return TrialOutcome(None, {"": why})
    found = {form: _differs(copy, anatomy, each, aligned) for form, each in calls.items() if form}
    return TrialOutcome(anatomy, {form: why for form, why in found.items() if why is not None}, aligned)


def _calls(copy: Any, ids: Tensor) -> dict[str, list[dict[str, Any]]]:  # (BATCH, LENGTH)
    """Keyword arguments of the forwards in the trial, by the kind of call that a step may make."""
    routed, places = _routing(copy), torch.arange(LENGTH, device=ids.device)
    plain = {"input_ids": ids, "labels": ids, **dict.fromkeys(routed, False)}
    documents = torch.stack([torch.cat([places[:4], places[:-4]]), places])
    padded = {}
    for side, kept in ((RIGHT, places < LENGTH - 3), (LEFT, places >= 3)):
        mask = torch.stack([torch.ones_like(kept), kept])  # padding is in the second sequence, its labels are -100
        padded[side] = {**plain, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return {
        "": [plain],
        **{side: [call] for side, call in padded.items()},
        PACKING: [{**plain, "position_ids": documents}],
        **({ROUTING: [{**plain, **routed}, {**padded[RIGHT], **routed}]} if routed else {}),
    }


def _routing(copy: Any) -> dict[str, bool]:
    """Keyword argument that asks for routers' logits, if the configuration knows it."""
    return {name: True for name in ("output_router_logits",) if name in vars(copy.config)}


def _differs(copy: nn.Module, anatomy: Anatomy, calls: list[dict[str, Any]], aligned: bool = False) -> str | None:
    """Describe how the cut and whole copy differ in these calls, or what they raised; None if they agree."""
    try:
        differences = (compared(whole(copy, call), cut(copy, anatomy, call, aligned)) for call in calls)
        return next(filter(None, differences), None)
    except Exception as error:
        return _one_line(error)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (
        f"it {text}" if isinstance(error, Unfit) else f"a small copy of it raises {type(error).__name__}: {text[:200]}"
    )


def whole(copy: Any, call: Mapping[str, Any]) -> tuple[Tensor, Gradients]:
    """Return (loss, gradients) of the uncut model."""
    loss = copy(**call, use_cache=False).loss
    loss.backward()
    return loss.detach(), _taken(copy)


def _taken(copy: nn.Module) -> Gradients:
    found = {name: p.grad for name, p in copy.named_parameters() if p.grad is not None}
    copy.zero_grad(set_to_none=True)
    return found


def cut(copy: nn.Module, anatomy: Anatomy, call: Mapping[str, Any], aligned: bool = False) -> tuple[Tensor, Gradients]:
    """Return (loss, gradients) of three stages and three slices; tied parameters' gradients are summed."""
    model = CausalModel(copy, anatomy)
    read = model.read((), {**call, "use_cache": False})
    count = len(model.blocks)
    bounds = [*sorted({0, count // 2, max(1, count - 1)}), count] if count > 1 else [0, 1]
    places = [StagePlace(a, b, a == 0, b == count) for a, b in pairwise(bounds)]
    models = [CausalModel(deepcopy(copy), anatomy, aligned=aligned) for _ in places]
    for own, place in zip(models, places, strict=True):
        own.keep(place)
    stages = [Stage(own, place, [read], SLICES, Keep()) for own, place in zip(models, places, strict=True)]
    for index in range(len(SLICES)):
        hidden: Tensor | None = None
        for stage in stages:
            hidden = stage.forward(0, index, hidden)
    logits = torch.cat(stages[-1].outputs[0], dim=1).requires_grad_()
    loss = models[-1].answer(read, logits).loss
    loss.backward()
    assert logits.grad is not None
    for index, grad in reversed(list(enumerate(logits.grad.split(SLICES, dim=1)))):
        for stage in reversed(stages):
            towards = stage.backward(0, index, grad)
            grad = grad if towards is None else towards
    # By the first name that a parameter has in the whole model.
    firsts = dict(copy.named_parameters(remove_duplicate=False))
    first = {parameter: name for name, parameter in copy.named_parameters()}
    total: Gradients = {}
    for model in models:
        for name, grad in _taken(model.module).items():
            known = first[firsts[name]]
            total[known] = total[known] + grad if known in total else grad
    return loss.detach(), total


def compared(wanted: tuple[Tensor, Gradients], found: tuple[Tensor, Gradients]) -> str | None:
    """Describe the first difference of loss and gradients beyond TOLERANCE; None if there is none."""
    difference = float((found[0] - wanted[0]).abs() / wanted[0].abs())
    if not difference < TOLERANCE:
        return f"the loss of a small copy differs by {difference:.1e} of itself"
    largest = max(float(grad.norm()) for grad in wanted[1].values())
    zero = torch.zeros(())
    for name in dict.fromkeys([*wanted[1], *found[1]]):
        mine, theirs = found[1].get(name, zero), wanted[1].get(name, zero)
        difference = float((mine - theirs).norm()) / max(float(theirs.norm()), FLOOR * largest)
        if not difference < TOLERANCE:
            return f"the gradient of {name} in a small copy differs by {difference:.1e} of itself"
    return None
