"""Checks of an elastic run's options: rules without sums over all workers, stateless codecs, topologies for any number.

`JoinCheck` compares the settings and the model that all members of a run must share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.elastic.plan.view import ElasticSettings
from lightning_decentral.elastic.wire.sockets.mesh import KEPT_ROUNDS
from lightning_decentral.gossip.compute.combine.combine import Combine, Rule, refuse_overshoot
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.mixer_builder import check_states
from lightning_decentral.gossip.plan.checks import check_equals
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.making import parameters_of
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.plan.described import described, first_difference
from lightning_decentral.shared.settings import of_callbacks, of_method, of_optimizers, of_trainer, versions

OF_ONE_MEMBER = ("elastic", "replicas.elastic", "island", "precision_plugin.device")
"""Settings that may differ among workers: addresses, weights, devices; and `dead_after`, which the lobby sets."""
MOST_CHECKED = 64  # A topology is checked for all sizes up to this one, and for the largest.


def elastic_rule(
    combine: Rule, topology: Topology, weights: Weights, codec: Codec, delay: int, elastic: ElasticSettings
) -> Combine:
    """Return the rule for any number of workers. ValueError for a setting under which workers can't join and leave."""
    if reason := combine.recovery.tied:
        raise ValueError(f"{type(combine).__name__} isn't compatible with elastic: {reason}; use Gossip()")
    assert isinstance(combine, Combine)
    _refuse_delay(combine, delay, elastic)
    most, fragments = elastic.workers[1], topology.placed(1).fragments
    try:
        placed = combine.placed(fragments[0], most)
        for size in _sizes(most):
            if combine.placed(fragments[0], size) != placed:
                raise ValueError(f"{combine!r} differs from the rule for {most} workers: give its numbers")
            for fragment in fragments:
                placed.check(fragment, size, weights, delay)
    except ValueError as error:
        raise ValueError(f"an elastic run may have any number of workers up to {most}; with {size}: {error}") from None
    # Differences from earlier messages need those messages at both ends of a link, which a newcomer doesn't have.
    if codec.remembers or not (codec.complete or placed.form.differences):
        sends = "sends differences from a neighbour's earlier messages, and neighbours change"
        raise ValueError(
            f"{codec!r} isn't compatible with elastic: it {sends if codec.remembers else 'loses too much by itself'}; "
            "use Int8() or BFloat16(), or combine=PseudoGradient() with Int4(), Int2() or TopK()"
        )
    refuse_overshoot(codec, placed)
    return placed


def _refuse_delay(combine: Combine, delay: int, elastic: ElasticSettings) -> None:
    if elastic.asynchronous is not None and (type(combine) is not Gossip or delay != 1):
        given = f"delay={delay}" if type(combine) is Gossip else repr(combine)
        raise ValueError(f"{given} isn't compatible with asynchronous rounds, which mix what has come: leave it out")
    if delay > KEPT_ROUNDS:  # a member would wait for ever for a message that it has dropped
        raise ValueError(f"delay={delay} isn't compatible with elastic: messages are kept for {KEPT_ROUNDS} rounds")


def committed_rule(placed: Combine, topology: Topology, weights: Weights, most: int) -> Combine | None:
    """Return the form of an outer rule with committed rounds (`plan.commit`), if all members always average all.
    None for other rules and topologies, where each member mixes what it has received."""
    try:
        for size in _sizes(most):
            for fragment in topology.placed(1).fragments:
                check_equals(type(placed).__name__, fragment, size, weights)
    except ValueError:
        return None
    return placed.aligned


def refuse_extras(strategy: Any) -> None:
    """Raise ValueError for travelling `states` or `exact_steps` that elastic rounds can't have."""
    states, exact, elastic = strategy.states, strategy.exact_steps, strategy.elastic
    if elastic.asynchronous is not None and (states or exact):
        given = f"exact_steps={exact:g}" if exact else f"states={states!r}"
        raise ValueError(f"{given} isn't compatible with asynchronous rounds, which wait for nobody: leave it out")
    if 0 < exact < 1:
        raise ValueError(
            f"exact_steps={exact:g} is a share of the run, whose length depends on who takes part in an elastic run: "
            "give a number of steps"
        )
    if states and strategy.island.devices > 1:
        raise ValueError(
            f"optimizer states can't be mixed between elastic workers of {strategy.island!r}, whose first device alone "
            f"communicates: leave out states={states!r}"
        )
    for size in _sizes(elastic.workers[1]):
        check_states(strategy, strategy.topology.placed(1), size)


def refuse_overlap(optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError if two optimizers train one parameter, which would be mixed twice in a round."""
    every = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    if len(set(every)) < len(every):
        raise ValueError("elastic rounds mix each parameter once: give every parameter to one optimizer alone")


def _sizes(most: int) -> list[int]:
    return sorted({*range(2, min(most, MOST_CHECKED) + 1), most} - {1})


def settings_of(strategy: Any, trainer: Trainer) -> dict[str, str]:
    """Return the settings that all members must share: {name: text}."""
    found = {**of_method(strategy, strategy.precision_plugin), **of_trainer(trainer), **of_callbacks(trainer)}
    found |= of_optimizers(strategy.optimizers, strategy.own)
    own = tuple(f"{name}." for name in OF_ONE_MEMBER)
    alike = {name: text for name, text in found.items() if not f"{name}.".startswith(own)}
    plan = described(strategy.elastic.workers, "elastic.workers")
    return {**versions(), **alike, **plan, **described(strategy.elastic.asynchronous, "elastic.asynchronous")}


Part = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class JoinCheck:
    """Compares a new worker's settings and model with the run's before the worker takes part.

        donor     sends its settings and model, as text, along with the training state
        newcomer  looks for the first difference; if there is one, its `fit` ends with an error that names it

    Every worker but the first copies a member's state, so all members equal the first."""

    settings: Mapping[str, str]  # this worker's `settings_of`
    model: Mapping[str, str]  # `layout.described` of the whole model, before it was sharded or split
    present: Mapping[str, str] = field(default_factory=dict)  # `part_of` this device's part of the model at the start
    part: int = 0  # index of this device's part among the worker's parts: its stage

    def now(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return {name: value} that a newcomer's must equal: settings, model, tensors `present` now in each part of the
        model, and trained parameters."""
        text = json.dumps([self.settings, self.model, [part["present"] for part in parts]])
        given = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)  # too long for a frame
        return {"given": given, "trained": [part["trained"] for part in parts]}

    def thaw(self, module: nn.Module, value: Mapping[str, Any]) -> None:
        """Freeze or unfreeze the module's parameters as in the same part of the donor's model."""
        trained = value["trained"][self.part]
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))

    def take(self, module: nn.Module, value: Mapping[str, Any]) -> None:
        """Freeze or unfreeze as the donor. ValueError if this worker can't use its state."""
        if refused := self.refuses(value):
            raise ValueError(refused)
        self.thaw(module, value)

    def refuses(self, value: Mapping[str, Any]) -> str:
        """Return why this worker can't use a member's state; empty if it can."""
        settings, model, parts = json.loads(bytes(value["given"].tolist())) if "given" in value else ({}, {}, [])
        now = parts[self.part] if self.part < len(parts) else {}
        if found := first_difference(self.settings, settings):
            return f"this worker has {found[0]}, the run has {found[1]}: give every worker the same settings"
        if found := first_difference(self.model, model, sign=" "):
            return f"this worker has {found[0]} where the run has {found[1]}: every worker must build the same model"
        if found := first_difference(self.present, now, sign=" "):
            return (
                f"this worker has {found[0]} where the run has {found[1]} by now, which a newcomer can't make: prune, "
                "reparametrize and add parameter groups before a fit, or resume from a checkpoint"
            )
        return ""


def part_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> Part:
    """Describe this device's part of the model. It has each tensor's shape and type, each parameter group's size (both
    may change during training), and whether each parameter is trained."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found |= {f"group {n} of the optimizer": f"of {len(g['params'])} parameters" for n, g in enumerate(groups)}
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return {"present": found, "trained": trained}
