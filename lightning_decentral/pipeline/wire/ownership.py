"""Stage ownership: which stage holds which parameter; model and optimizer state split over stages, joined again.

A stage's parameters keep the names that they have in the whole model, so that a checkpoint of the whole is the union of
what the stages have.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.pipeline.compute.model import Pipelined, StagePlace
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport

State = dict[str, Any]


class Ownership:
    """One stage's part of a module.

    Args:
        module: the whole, with the pipelined model somewhere in it.
        over: the stages of this pipeline; None: there is but one.
    """

    def __init__(self, module: nn.Module, model: Pipelined, place: StagePlace, over: Transport | None) -> None:
        self._module, self._model, self._over = module, model, over
        self.order = {parameter: name for name, parameter in module.named_parameters()}
        """The first name of each parameter of the whole model, in its order."""
        self.state_keys = list(module.state_dict())
        """Names of the whole model's state."""
        self._shapes = {parameter: parameter.shape for parameter in self.order}  # what others hold will be empty
        buffers = {name for name, _ in module.named_buffers()}
        inside = set(model.module.parameters())
        model.keep(place)
        self.kept = set(module.parameters())
        for parameter in self.order.keys() - self.kept:
            parameter.data = parameter.data.new_empty(0)  # gives up the memory; `give_back` fills the same object
        mine = (
            *([self.order[p] for p in self.order if p in self.kept], list(module.state_dict())),
            [name for name, _ in module.named_buffers()],
        )
        rows = [mine] if over is None else gather_objects(over, mine)
        self._keys = [set(keys) for _, keys, _ in rows]
        assert set(self.state_keys) <= set().union(*self._keys), "every key of the state has a stage that holds it"
        self._cut = buffers - set.intersection(*(set(names) for _, _, names in rows))  # buffers that some stages lack
        holders = {name: [r for r, (names, *_) in enumerate(rows) if name in names] for name in self.order.values()}
        trained = [p for p in self.order if p.requires_grad and p in self.kept]
        self.tied = {p: holders[self.order[p]] for p in trained if p in inside and len(holders[self.order[p]]) > 1}
        """Parameters of the model that stand on several stages, and on which."""
        self.outside = [p for p in trained if p not in inside]
        """Parameters beside the model; every stage has them, the last one uses them."""
        self.counted = [p for p in trained if holders[self.order[p]][0] == (0 if over is None else over.rank)]
        """Those that a sum over the stages takes from this one."""

    @torch.no_grad()
    def share_buffers(self, device: torch.device) -> None:
        """Every stage gets the last one's buffers, but for those of other stages' blocks. Collective.

        What a step of the user's does after its call of the model, it does on the last stage alone.
        """
        if self._over is None:
            return
        own = {name: buffer for name, buffer in self._module.named_buffers() if name not in self._cut}
        forms = gather_objects(self._over, {name: (tuple(b.shape), b.dtype) for name, b in own.items()})
        for name, form in forms[-1].items():
            fits = forms[self._over.rank].get(name) == form  # not one that a step has made, or given its size
            values = own[name] if fits else torch.empty(form[0], dtype=form[1], device=device)
            values = values.to(device).contiguous()
            self._over.broadcast(values, self._over.size - 1).wait()
            if not fits:
                path, _, leaf = name.rpartition(".")
                self._module.get_submodule(path)._buffers[leaf] = values
            elif values is not own[name]:
                own[name].copy_(values)

    def give_back(self, device: torch.device) -> None:
        """Make the module whole again on every stage, on the CPU. Collective."""
        self.share_buffers(device)
        self._model.restore()
        self._module.cpu()  # and one tensor after the other: a device need only have room for its own stage
        over, self._over = self._over, None  # its group ends with the fit
        if over is None:
            return
        whole: Mapping[str, Tensor] = self._module.state_dict(keep_vars=True)
        for name, tensor in whole.items():
            holders = [r for r, keys in enumerate(self._keys) if name in keys]
            # Parameters that all have, too: a step may have written to one on the last stage alone.
            if 0 < len(holders) < over.size or isinstance(tensor, nn.Parameter):
                self._fill(tensor, holders[-1], device, over)

    def _fill(self, tensor: Tensor, owner: int, device: torch.device, over: Transport) -> None:
        shape = self._shapes.get(tensor, tensor.shape)  # type: ignore[call-overload]
        values = tensor.detach() if owner == over.rank else tensor.detach().new_empty(shape)
        values = values.to(device).contiguous()
        over.broadcast(values, owner).wait()
        tensor.data = values.cpu()


def optimizer_part(optimizer: Optimizer, state: State, order: Mapping[nn.Parameter, str]) -> State:
    """One stage's optimizer state by the names of parameters instead of their numbers."""
    names = [[order[p] for p in group["params"]] for group in optimizer.param_groups]
    flat = [name for group in names for name in group]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {"names": names, "settings": settings, "state": {flat[i]: values for i, values in state["state"].items()}}


def settings_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """[group]: what it has beside its parameters, in words."""
    own = {"params", "param_names"}
    return [{key: _said(value) for key, value in g.items() if key not in own} for g in optimizer.param_groups]


def _said(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def check_same_groups(workers: Sequence[Sequence[Sequence[Mapping[str, str]]]]) -> None:
    """See that one file can hold the groups of all.

    Args:
        workers: of each, of each of its optimizers, `settings_of` it.

    Raises:
        ValueError: on all workers, their optimizers have come to other groups.
    """
    for rank, others in enumerate(workers):
        for theirs, ours in zip(others, workers[0], strict=True):
            if theirs != ours:
                raise ValueError(
                    f"the optimizer's groups differ between stages ({_difference(theirs, ours, rank)}), so no file can "
                    "hold them: make the same groups on every stage, empty ones too, and change all alike"
                )


def _difference(theirs: Sequence[Mapping[str, str]], ours: Sequence[Mapping[str, str]], rank: int) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} on worker {rank}, {len(ours)} on worker 0"
    pairs = enumerate(zip(theirs, ours, strict=True))
    group, key = next((g, key) for g, (a, b) in pairs for key in sorted({*a, *b}) if a.get(key) != b.get(key))
    return f"group {group}: {key}={theirs[group].get(key)} on worker {rank}, {ours[group].get(key)} on worker 0"


def joined_names(parts: Sequence[Sequence[Sequence[str]]], order: Sequence[str]) -> list[list[str]]:
    """[group]: names of all stages' parameters of this group, in the order of the whole model."""
    place = {name: i for i, name in enumerate(order)}
    return [sorted({name for part in parts for name in part[g]}, key=place.__getitem__) for g in range(len(parts[0]))]


def optimizer_whole(parts: Sequence[State], order: Sequence[str]) -> State:
    """The state that the optimizer of the whole model would have."""
    groups = joined_names([part["names"] for part in parts], order)
    number = {name: i for i, name in enumerate(name for group in groups for name in group)}
    # Reversed: the first stage's, where several have one.
    state = {number[name]: values for part in reversed(parts) for name, values in part["state"].items()}
    settings = [
        {**setting, "params": [number[name] for name in group]}
        for setting, group in zip(parts[0]["settings"], groups, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": settings}


def optimizer_own(whole: State, groups: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> State:
    """One stage's part of it, by the numbers that its optimizer has.

    Raises:
        ValueError: the state is of other groups.
    """
    sizes, wanted = [len(group["params"]) for group in whole["param_groups"]], [len(group) for group in groups]
    if sizes != wanted:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, this one's have {wanted}: "
            "resume with the same configure_optimizers"
        )
    flat = (i for group in whole["param_groups"] for i in group["params"])
    number = dict(zip((name for group in groups for name in group), flat, strict=True))
    state, settings, count = {}, [], 0
    for setting, names in zip(whole["param_groups"], own, strict=True):
        here = range(count, count + len(names))
        state.update(
            {i: whole["state"][number[n]] for i, n in zip(here, names, strict=True) if number[n] in whole["state"]}
        )
        settings.append({**setting, "params": list(here)})
        count += len(names)
    return {"state": state, "param_groups": settings}
