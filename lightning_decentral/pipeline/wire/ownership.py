"""Stage ownership: which stage has which parameter; split model and optimizer state over stages, and join it again.

A stage's parameters keep their names in the whole model, so a checkpoint of the whole is the union of the stages'
checkpoints."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.pipeline.compute.model import Pipelined, StagePlace
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport

State = dict[str, Any]
Form = tuple[tuple[int, ...], torch.dtype, bool]  # Shape, type, and whether it is in a state_dict.


class Ownership:
    """Tracks which parameters of a module this stage has, and which other stages share them. `module`: the whole
    module, which contains the pipelined model. `over`: the stages of this pipeline; None: a single stage."""

    def __init__(self, module: nn.Module, model: Pipelined, place: StagePlace, over: Transport | None) -> None:
        self._module, self._model, self._over = module, model, over
        self.order = _named(module)
        """First name of each parameter of the whole model, in the model's order."""
        self.state_keys = list(module.state_dict())
        """Keys of the whole model's state_dict."""
        self._shapes = {parameter: parameter.shape for parameter in self.order}  # those of others will be empty
        inside = set(model.module.parameters())
        model.keep(place)
        self.kept = set(module.parameters())
        for parameter in self.order.keys() - self.kept:
            parameter.data = parameter.data.new_empty(0)  # frees the memory; `give_back` fills the same object
        mine = (
            *([self.order[p] for p in self.order if p in self.kept], list(module.state_dict())),
            [(path, type(part).__name__) for path, part in module.named_modules()],
        )
        rows = [mine] if over is None else gather_objects(over, mine)
        self._keys = [set(keys) for _, keys, _ in rows]
        assert set(self.state_keys) <= set().union(*self._keys), "every key of the state has a stage that holds it"
        # By module, since buffers may appear while training.
        self._everywhere = {path for path, _ in set.intersection(*({*parts} for *_, parts in rows))}
        holders = {name: [r for r, (names, *_) in enumerate(rows) if name in names] for name in self.order.values()}
        self.several = [name for name in self.order.values() if len(holders[name]) > 1]
        """Names of parameters on several stages, the same list on all stages."""
        self._names = _named(module)
        rank, kept = 0 if over is None else over.rank, [p for p in self.order if p in self.kept]
        self.tied = {p: holders[self.order[p]] for p in kept if p in inside and len(holders[self.order[p]]) > 1}
        """Parameters of the model on several stages, with these stages."""
        self.outside = [p for p in kept if p not in inside]
        """Parameters outside the model: every stage has them, the last stage uses them."""
        self.counted = dict.fromkeys(p for p in kept if holders[self.order[p]][0] == rank)
        """Parameters that this stage contributes to sums over stages, in the order of the model."""

    # ---- what is trained now: freezing and thawing come at any time ---------------------------------------------

    def flags(self) -> Tensor:
        """[several]: 1 if this stage trains the parameter, 0 if it's frozen here, -1 if it isn't here."""
        here = {self.order[p]: float(p.requires_grad) for p in (*self.tied, *self.outside)}
        return torch.tensor([here.get(name, -1.0) for name in self.several], dtype=torch.float64)

    def refuse_uneven(self, flags: Tensor) -> None:  # (stages, several)
        """Raise RuntimeError on all stages for a parameter that only some stages train, by each stage's `flags`."""
        for name, column in zip(self.several, flags.unbind(1), strict=True):
            if len({flag for flag in column.tolist() if flag >= 0}) > 1:
                raise RuntimeError(
                    f"{name} is trained on one stage and frozen on another: freeze and thaw on every stage alike, in a "
                    "hook or before the call of the model"
                )

    def refuse_changed(self, together: bool = False) -> None:
        """RuntimeError if this stage's parameters, or their names, have changed since set-up. `together`: raise on all
        stages if one stage's have changed; then collective."""
        now, reason = self._names if self._over is None else _named(self._module), ""
        if now != self._names:
            changed = next(p for p in (*self._names, *now) if self._names.get(p) != now.get(p))
            before, after = self._names.get(changed), now.get(changed)
            what = f"became {after}" if before and after else "was added or removed"
            reason = (
                f"the parameter {before or after} {what} while training, but the other stages and checkpoints of the "
                "whole model keep the former parameters. Prune, reparametrize and replace modules before fit, or make "
                "the change permanent in the same hook (prune.remove)"
            )
        reasons = gather_objects(self._over, reason) if together and self._over is not None else [reason]
        if any(reasons):
            raise RuntimeError(max(reasons, key=bool))

    # ---- buffers, and the whole module again --------------------------------------------------------------------

    @torch.no_grad()
    def share_buffers(self, device: torch.device) -> None:
        """Copy the last stage's buffers to every stage, except buffers of other stages' blocks. Collective.

        Code of the user's step after its call of the model runs only on the last stage."""
        if self._over is not None:
            forms = gather_objects(self._over, self._forms(everywhere=True))
            for name, form in forms[-1].items():
                self._put(name, form, self._over.size - 1, device, self._over)

    def _forms(self, everywhere: bool) -> dict[str, Form]:
        """Forms of buffers by name: buffers of modules on all stages, or of blocks."""
        found = {}
        for path, part in self._module.named_modules():
            for leaf, buffer in part._buffers.items() if (path in self._everywhere) == everywhere else ():
                if buffer is not None:
                    form = tuple(buffer.shape), buffer.dtype, leaf not in part._non_persistent_buffers_set
                    found[f"{path}.{leaf}" if path else leaf] = form
        return found

    def _put(self, name: str, form: Form, owner: int, device: torch.device, over: Transport) -> None:
        """Copy the owner's values into a buffer, which may be missing here or have another form. Collective."""
        (shape, dtype, persistent), (path, _, leaf) = form, name.rpartition(".")
        part = dict(self._module.named_modules()).get(path)
        own = None if part is None else part._buffers.get(leaf)
        fits = own is not None and (own.shape, own.dtype) == (shape, dtype)  # a step may have made it anew
        values = torch.empty(shape, dtype=dtype, device=device)
        if own is not None and fits:
            values.copy_(own)
        over.broadcast(values, owner).wait()
        if own is not None and fits:
            own.copy_(values)
        elif part is not None:
            part._buffers.pop(leaf, None)
            part.register_buffer(leaf, values if self._over is not None else values.cpu(), persistent)

    @torch.no_grad()
    def give_back(self, device: torch.device) -> None:
        """Make the module whole again on every stage, on the CPU. Collective."""
        self.refuse_changed(together=True)
        self.share_buffers(device)
        held = self._forms(everywhere=False)
        self._model.restore()
        self._module.cpu()  # then tensor by tensor: a device has memory for its own stage only
        over, self._over = self._over, None  # the group ends with the fit
        if over is None:
            return
        whole = {name: p for name, p in self._module.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
        trained = gather_objects(over, {name for name, parameter in whole.items() if parameter.requires_grad})
        for name in (name for name in self.state_keys if name in whole):  # in one order: permanent pruning changes it
            # From the last stage, even if all stages have the tensor: only there a step may have written to it.
            owner = [r for r, keys in enumerate(self._keys) if name in keys][-1]
            tensor = whole[name]
            shape = self._shapes.get(tensor, tensor.shape)
            values = tensor.detach() if owner == over.rank else tensor.detach().new_empty(shape)
            values = values.to(device).contiguous()
            over.broadcast(values, owner).wait()
            tensor.data = values.cpu()
            tensor.requires_grad_(name in trained[owner])
        for owner, row in enumerate(gather_objects(over, held)):
            for name, form in row.items():
                self._put(name, form, owner, device, over)


def _named(module: nn.Module) -> dict[nn.Parameter, str]:
    # By hand: `named_parameters` counts as a read of all parameters, of which a stage has a part (`totals`).
    named: dict[nn.Parameter, str] = {}
    for path, part in module.named_modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                named.setdefault(parameter, f"{path}.{leaf}" if path else leaf)
    return named


def optimizer_part(optimizer: Optimizer, state: State, order: Mapping[nn.Parameter, str]) -> State:
    """Convert a stage's optimizer state to the names of parameters instead of their numbers."""
    names = [[order[p] for p in group["params"]] for group in optimizer.param_groups]
    flat = [name for group in names for name in group]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {"names": names, "settings": settings, "state": {flat[i]: values for i, values in state["state"].items()}}


def settings_of(optimizer: Optimizer) -> list[dict[str, str]]:
    """List each parameter group's settings as text, without its parameters."""
    return [
        {
            key: repr(value.tolist() if isinstance(value, Tensor) else value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def check_same_groups(workers: Sequence[Sequence[Sequence[Mapping[str, str]]]]) -> None:
    """Check that one checkpoint can hold the parameter groups of all workers. `workers`: `settings_of` each optimizer
    of each worker. ValueError: on all workers, the optimizers' groups have become different."""
    for rank, others in enumerate(workers):
        for theirs, ours in zip(others, workers[0], strict=True):
            if theirs == ours:
                continue
            what, (mine, first) = "", (str(len(theirs)), str(len(ours)))
            if len(theirs) == len(ours):
                pairs = enumerate(zip(theirs, ours, strict=True))
                g, key = next((g, key) for g, (a, b) in pairs for key in sorted({*a, *b}) if a.get(key) != b.get(key))
                what, mine, first = f"group {g}: {key}=", str(theirs[g].get(key)), str(ours[g].get(key))
            raise ValueError(
                f"the optimizer's groups differ between stages ({what}{mine} on worker {rank}, {first} on worker 0), "
                "so no checkpoint can hold them. Make the same groups on every stage, empty ones too, and change all "
                "alike"
            )


def joined_names(parts: Sequence[Sequence[Sequence[str]]], order: Sequence[str]) -> list[list[str]]:
    """Merge the names of all stages' parameters in each group, in the order of the whole model."""
    place = {name: i for i, name in enumerate(order)}
    return [sorted({name for part in parts for name in part[g]}, key=place.__getitem__) for g in range(len(parts[0]))]


def optimizer_whole(parts: Sequence[State], order: Sequence[str]) -> State:
    """Merge the stages' optimizer states into the whole model's."""
    groups = joined_names([part["names"] for part in parts], order)
    number = {name: i for i, name in enumerate(name for group in groups for name in group)}
    # Reversed: of several stages' states for a parameter, the first stage's stays.
    state = {number[name]: values for part in reversed(parts) for name, values in part["state"].items()}
    settings = [
        {**setting, "params": [number[name] for name in group]}
        for setting, group in zip(parts[0]["settings"], groups, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": settings}


def optimizer_own(whole: State, groups: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> State:
    """Extract one stage's part of the whole optimizer state, by the numbers in its own optimizer. ValueError: the state
    has other parameter groups."""
    sizes, wanted = [len(group["params"]) for group in whole["param_groups"]], [len(group) for group in groups]
    if sizes != wanted:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, but this optimizer's have {wanted}: "
            "resume with the same configure_optimizers"
        )
    flat = (i for group in whole["param_groups"] for i in group["params"])
    number = dict(zip((name for group in groups for name in group), flat, strict=True))
    mine = [number[name] for names in own for name in names]
    here = iter(range(len(mine)))
    pairs = zip(whole["param_groups"], own, strict=True)
    settings = [{**setting, "params": list(islice(here, len(names)))} for setting, names in pairs]
    state = {i: whole["state"][n] for i, n in enumerate(mine) if n in whole["state"]}
    return {"state": state, "param_groups": settings}
