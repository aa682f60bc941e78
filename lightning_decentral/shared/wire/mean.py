"""The mean model: exact mean over workers by all-reduce, swapped into the model for a while or taken for good.

`shared.evaluation` decides when the mean is swapped in; `shared.checkpoint` saves it and resumes from it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.carried import carried_of
from lightning_decentral.shared.compute.layout import put
from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.gradients import pack, parts
from lightning_decentral.shared.wire.transport import Transport

MeanOf = Callable[..., list[Tensor]]
"""Function (averaged, carried) -> means of the averaged tensors, then one worker's carried tensors; collective."""
Shown = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Function that maps a worker's tensors to the tensors that are averaged in their place, mostly themselves."""
ROUNDINGS = 8
"""A parameter that was changed and restored may differ by so many roundings of its largest magnitude."""
CHUNK_BYTES = 64 * 2**20  # bytes summed at a time: one flat copy of all would need the memory of another model


@torch.no_grad()
def mean(tensors: Sequence[Tensor], over: Transport, share: float | None = None) -> list[Tensor]:
    """sum over workers of share * each tensor, as new tensors; every worker gets the same bits.

    Shares sum to one; None is 1/n each. Half precision is summed in float32. What isn't floating point (counters,
    indices) is this worker's own."""
    results = [tensor.detach().clone() for tensor in tensors]
    chunks: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}  # of CHUNK_BYTES and one tensor at most
    for result in results:
        if not (result.is_floating_point() or result.is_complex()):
            continue
        rows = chunks.setdefault((result.dtype, result.device), [[]])
        if sum(t.numel() * t.element_size() for t in rows[-1]) > CHUNK_BYTES:
            rows.append([])
        rows[-1].append(result)
    for members in (m for rows in chunks.values() for m in rows):
        exact = torch.promote_types(members[0].dtype, torch.float32)  # half precision loses small shares
        flat = torch.empty(sum(t.numel() for t in members), dtype=exact, device=members[0].device)  # (elements,)
        pack(members, members, flat)
        # Before the sum: a mask of the largest finite number stays finite.
        flat = flat.div_(over.size) if share is None else flat.mul_(share)
        over.all_reduce(flat).wait()
        for tensor, part in zip(members, parts(flat, members), strict=True):
            tensor.copy_(part)
    return results


def mean_of_states(state: Mapping[str, Any], mean_of: MeanOf, carried: Collection[str] = ()) -> dict[str, Any]:
    """Return a `state_dict` with means over the workers, and with `carried` tensors copied from one worker.

    Other entries are this worker's. Tied entries stay tied."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    place = {}  # equal for tied tensors
    for key, tensor in tensors.items():
        here = local(tensor)
        # Empty tensors have no address: they would all be tied.
        place[key] = here.data_ptr(), tensor.shape, tensor.stride(), key if here.numel() == 0 else ""
    unique = {place[key]: tensor for key, tensor in tensors.items()}
    of_one = {place[key] for key in tensors if key in carried}
    averaged, alone = [p for p in unique if p not in of_one], [p for p in unique if p in of_one]
    values = _values(mean_of, [unique[p] for p in averaged], [unique[p] for p in alone])
    found = dict(zip([*averaged, *alone], values, strict=True))
    return {key: found[place[key]] if key in place else value for key, value in state.items()}


def _values(mean_of: MeanOf, averaged: Sequence[Tensor], carried: Sequence[Tensor]) -> list[Tensor]:
    return mean_of(averaged, carried) if carried else mean_of(averaged)


class Swap:
    """Swaps values into a model's tensors until `undo`. Keeps one copy of the tensors' own values."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._own = [tensor.detach().clone() for tensor in tensors]
        self._put(values)
        self._stood = list(values)  # versions, which show later writes

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            put(tensor, value)

    def undo(self) -> list[Tensor]:
        """Restore the tensors' own values, bit for bit. Tensors that were written meanwhile keep their change (a best
        score from validation, the best weights that a callback restores), and are returned."""
        written = self.written()
        for i in written:
            self._own[i] = self._tensors[i].detach().clone()
        self._put(self._own)
        return [self._tensors[i] for i in written]

    def written(self) -> list[int]:
        """Return the indices of the tensors that were written since the swap."""
        return [i for i, (now, stood) in enumerate(zip(self._tensors, self._stood, strict=True)) if _other(now, stood)]

    def keep(self, changed: Sequence[Tensor]) -> None:
        """Keep the present values of these tensors, instead of those before the swap."""
        places = {id(tensor): i for i, tensor in enumerate(self._tensors)}
        for tensor in changed:
            self._own[places[id(tensor)]] = tensor.detach().clone()

    @torch.no_grad()
    def paused(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return `state`, the model's state_dict, as it would be without the swap, in fresh copies."""
        now = [tensor.detach().clone() for tensor in self._tensors]
        self._put(self._own)
        own = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in state.items()}
        self._put(now)
        return own


@torch.no_grad()
def _other(now: Tensor, stood: Tensor) -> bool:
    """Return whether a tensor was written. Rounding of a parameter doesn't count (adapters merged and taken out again):
    otherwise the mean would replace each worker's own parameter."""
    trained, now, stood = isinstance(now, nn.Parameter), local(now), local(stood).to(now.dtype)
    if torch.equal(now, stood) or not now.numel():
        return False
    if not trained or not bool(stood.isfinite().all()):
        return True
    rounding = ROUNDINGS * torch.finfo(now.dtype).eps * float(stood.abs().max())
    return not float((now - stood).abs().max()) <= rounding


def of_mean(modules: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distinct tensors of a mean model: floating-point parameters and buffers that are averaged, and tensors
    of any type that come from one worker (`carried`)."""
    carried = carried_of(modules)
    alone = {id(tensor) for tensor in carried}
    tensors = dict.fromkeys(t for module in modules for t in (*module.parameters(), *module.buffers()))
    return [t for t in tensors if (t.is_floating_point() or t.is_complex()) and id(t) not in alone], carried


class MeanModel:
    """Swaps mean = sum_i share_i x_i into the model for a while, or sets the parameters to the mean for good."""

    def __init__(self, mean_of: MeanOf, shown: Shown = list) -> None:
        self.mean_of, self._shown = mean_of, shown
        # Called when the swap ends, with the tensors that were written meanwhile and keep their new values.
        self.hidden: Callable[[Sequence[Tensor]], Any] = bool
        self.diverged = False  # whether the workers differ
        self._swap: Swap | None = None

    def show(self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> None:
        """Swap the mean into these tensors, and one worker's values into the carried tensors, until `hide`.
        Collective."""
        self._swap = self._swapped(tensors, carried)

    def _swapped(self, tensors: Sequence[Tensor], carried: Sequence[Tensor]) -> Swap:
        return Swap([*tensors, *carried], _values(self.mean_of, self._shown(tensors), carried))

    def written(self) -> bool:
        """Return whether tensors were written while the mean was swapped in."""
        return self._swap is not None and bool(self._swap.written())

    @property
    def shows(self) -> bool:
        """Return whether the mean is swapped in."""
        return self._swap is not None

    def hide(self) -> None:
        """Restore the tensors, bit for bit, as before `show`, except those that were written meanwhile."""
        if self._swap is not None:
            written = self._swap.undo()
            self._swap = None
            self.hidden(written)

    @contextmanager
    def standing(
        self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()
    ) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Context with the mean swapped into these tensors, unless it is already or the workers are equal. Collective.

        Yields a function that marks parameters as written to stay. Buffers that change stay by themselves."""
        shown = self._swap is not None
        if self.diverged and not shown:
            self.show(tensors, carried)
        yield lambda changed: None if self._swap is None else self._swap.keep(changed)
        if not shown:
            self.hide()

    def forget(self) -> None:
        """End the swap: the tensors keep their present values, and their saved own values are dropped."""
        self._swap = None

    def take(self, tensors: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> None:
        """Set the tensors to their mean on all workers. Collective."""
        self._swapped(tensors, carried)  # never undone
        self.diverged = False

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this worker's own state_dict, also while the mean is swapped in."""
        return state if self._swap is None else self._swap.paused(state)

    def given(self, own: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """Return this worker's own state_dict with the tensors that the mean averages in place of its own (`Shown`).
        `model`: the present state_dict of the model, by whose tensors these are found."""
        tensors = {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
        pairs = zip(tensors.items(), self._shown([*tensors.values()]), strict=True)
        return {**own, **{name: shown for (name, tensor), shown in pairs if shown is not tensor and name in own}}
