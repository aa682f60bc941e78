"""Elastic methods: rules without sums over all workers, codecs that keep nothing, topologies of any number.

And what all members of a run must have alike (`JoinCheck`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.elastic.plan.view import ElasticSettings
from lightning_decentral.gossip.compute.combine.combine import Combine, Rule
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.plan.described import described, first_difference
from lightning_decentral.shared.settings import of_callbacks, of_method, of_optimizers, of_trainer, versions

UNSERVED: Mapping[str, tuple[Any, ...]] = {"states": (None, {}), "exact_steps": (0,)}
"""{option of GossipStrategy: the values that it may have in an elastic run}"""
OF_ONE_MEMBER = ("elastic", "replicas.elastic", "island", "precision_plugin.device")
"""Places, weights, numbers and kinds of devices are each worker's own. `dead_after` is the lobby's."""
MOST_CHECKED = 64  # Sizes for which a topology is checked before training, and the largest.


def served(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that an elastic run has. ValueError for one that it can't have, by name."""
    for name, values in UNSERVED.items():
        if name in options and options[name] not in values:
            raise ValueError(f"{name}={options[name]!r} doesn't go with elastic yet: leave it out")
    return {name: value for name, value in options.items() if name not in UNSERVED}


def elastic_rule(
    combine: Rule, topology: Topology, weights: Weights, codec: Codec, delay: int, elastic: ElasticSettings
) -> Combine:
    """The rule, as any number of workers has it. ValueError for what workers can't leave, by name."""
    if reason := combine.recovery.tied:
        raise ValueError(f"{type(combine).__name__} doesn't go with elastic: {reason}; use Gossip()")
    assert isinstance(combine, Combine)
    if elastic.asynchronous is not None and (type(combine) is not Gossip or delay != 1):
        given = f"delay={delay}" if type(combine) is Gossip else repr(combine)
        raise ValueError(f"{given} doesn't go with asynchronous rounds, in which what has come is mixed: leave it out")
    if len(topology.fragments) > 1:
        raise ValueError(f"{topology!r} doesn't go with elastic: its fragments have rounds of their own")
    most, one = elastic.workers[1], topology.placed(1)
    try:
        placed = combine.placed(one, most)
        for size in sorted({*range(2, min(most, MOST_CHECKED) + 1), most} - {1}):
            if combine.placed(one, size) != placed:
                raise ValueError(f"{combine!r} would be another rule than of {most}: give its numbers")
            placed.check(one, size, weights, delay)
    except ValueError as error:
        raise ValueError(f"elastic runs have any number of workers up to {most}, and of {size}: {error}") from None
    # Both ends of a link would have to know what was sent before.
    if codec.remembers or not (codec.complete or placed.form.differences):
        raise ValueError(
            f"{codec!r} doesn't go with elastic: it sends differences from what a neighbour received before, and "
            "neighbours change; use Int8() or BFloat16()"
        )
    return placed


def settings_of(strategy: Any, trainer: Trainer) -> dict[str, str]:
    """Settings that all members must have alike: {name: text}."""
    found = {**of_method(strategy, strategy.precision_plugin), **of_trainer(trainer), **of_callbacks(trainer)}
    found |= of_optimizers(strategy.optimizers, strategy.own)
    own = tuple(f"{name}." for name in OF_ONE_MEMBER)
    alike = {name: text for name, text in found.items() if not f"{name}.".startswith(own)}
    plan = described(strategy.elastic.workers, "elastic.workers")
    return {**versions(), **alike, **plan, **described(strategy.elastic.asynchronous, "elastic.asynchronous")}


Part = dict[str, dict[str, Any]]


class JoinCheck:
    """Settings and model of one worker, compared with the run's before it takes part.

        donor     its settings and model, as text, next to everything else that a newcomer takes
        newcomer  the first difference: it takes nothing, and its `fit` ends with that line

    All but the first take from a member, so each has what the first one has.
    """

    def __init__(
        self,
        settings: Mapping[str, str],  # as `settings_of`
        model: Mapping[str, str],  # as `layout.described`, of the whole model before anything was made of it
        present: Mapping[str, str] | None = None,  # as in `part_of`, where this device begins
        part: int = 0,  # number of this device's part of the model among the worker's: a stage
    ) -> None:
        self._settings, self._model, self._present = dict(settings), dict(model), dict(present or {})
        self._part = part

    def now(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return what a newcomer must have: settings, model, what is `present` now in each part of a member's model,
        and which parameters are trained."""
        text = json.dumps([self._settings, self._model, [part["present"] for part in parts]])
        given = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)  # longer than a frame may be
        return {"given": given, "trained": [part["trained"] for part in parts]}

    def thaw(self, module: nn.Module, value: Mapping[str, Any]) -> None:
        """Parameters are trained, or frozen, as in this part of the member's that gives the value."""
        trained = value["trained"][self._part]
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))

    def refuses(self, value: Mapping[str, Any]) -> str:
        """Return why this worker can't take what a member gives; empty: it can."""
        settings, model, parts = json.loads(bytes(value["given"].tolist())) if "given" in value else ({}, {}, [])
        now = parts[self._part] if self._part < len(parts) else {}
        if found := first_difference(self._settings, settings):
            return f"this worker has {found[0]}, the run has {found[1]}: give every worker the same"
        if found := first_difference(self._model, model, sign=" "):
            return f"this worker has {found[0]} where the run has {found[1]}: every worker must build the same model"
        if found := first_difference(self._present, now, sign=" "):
            return (
                f"this worker has {found[0]} where the run has {found[1]} by now, which a newcomer can't make: prune, "
                "reparametrize and add groups of parameters before a fit, or go on from a checkpoint"
            )
        return ""


def part_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> Part:
    """This device's part of the model: {tensor or group: its form}, what messages and means are made of, and what may
    change while training; and whether a parameter is trained."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found |= {f"group {n} of the optimizer": f"of {len(g['params'])} parameters" for n, g in enumerate(groups)}
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return {"present": found, "trained": trained}
