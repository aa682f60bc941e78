"""Residuals of a compressed mean (error feedback): the compression error of each tensor, added to its next message.

    debt of a tensor = (1/n) sum_i e_i + f      e_i: of worker i's messages; f: of its owner's means

The debt grows by the mean of the workers' gradients, less the means that all workers used.

    a mean (`add`)                            e <- e + flat; where updates may be skipped, both are kept as they were
    no worker uses the tensor (`put_back`)    f <- f + the unused mean
    the update is skipped (`updated`)         both <- as they were, of its tensors
    a scaler's factor has changed (`settle`)  the same where it fell, one step later; then both at the new scale
    tensors in other flat ones (`lay`)        e + n f goes with each tensor, until `at` finds it a place
    saved before the update (`state_dict`)    in the file as if it were skipped

A loss scaler or a check for NaN skips updates, and gradients have another scale afterwards. Residuals are kept as they
were before an update that is skipped, and in the scale of the gradients to come. A scaler's factor falls exactly where
it skips; the factor is read one step later, so that the host doesn't wait for a device."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.coded_parts import CodedParts
from lightning_decentral.shared.compute.device import AsyncRead

Row = tuple[tuple[int, int], ...]  # (key, elements) of the tensors that one flat tensor holds, in order
Span = tuple[int, int]  # (start, stop) of a tensor in a flat one
Keys = Callable[[], Collection[int]]


@dataclass
class Residual:
    """Residuals of one flat tensor: of this worker's messages, and of the means of its own part."""

    own: Tensor  # e_i, (elements,)
    owned: Tensor  # f, (elements of the own part,)
    rounds: int = 0  # number of means so far, which seeds the rounding noise
    before: list[Tensor] = field(default_factory=list)  # [own, owned] at the last update; [] where none is skipped
    taken: bool = True  # whether an update has followed the last mean

    def add(self, flat: Tensor) -> Tensor:
        """Add the flat tensor: own <- own + flat; returns `own`."""
        if not (self.before and self.taken):
            return self.own.add_(flat)
        self.taken = False
        self.before[1].copy_(self.owned)
        # Into the memory of the residual before the last update: nothing is copied.
        self.own, self.before[0] = torch.add(self.own, flat, out=self.before[0]), self.own
        return self.own


class Residuals:
    """Residuals of one worker for all its flat tensors; means whose updates are skipped are withdrawn."""

    def __init__(self, parts: CodedParts) -> None:
        self.guarded = False  # whether updates may be skipped: then earlier residuals are kept, too
        self._parts = parts  # gives each worker's part of a flat tensor
        self._rows: tuple[Row, ...] = ()  # number of the flat tensor that holds each tensor
        self._at: dict[int, Residual] = {}  # by place
        self._debts: dict[int, Tensor] = {}  # residuals of tensors that no flat tensor holds at present, by key
        self._rounds = 0  # means of former flat tensors: counted, so that no noise is drawn twice
        self._scale: Callable[[], Tensor] | None = None  # a loss scaler's factor
        self._scaled = True  # whether gradients come multiplied by it
        self._unit, self._known = 0.0, False  # scale of the residuals; 0 before the first mean
        self._open: list[tuple[Keys, AsyncRead]] = []  # updates after which the scale is still to be read
        self._any = False  # updates since the last mean

    def at(self, place: int, flat: Tensor) -> Residual:
        """Return the residual of flat tensor number `place`; a new one where there is none of its size."""
        found = self._at.get(place)
        if found is None or len(found.own) != flat.numel():
            own = torch.zeros_like(flat)
            for key, (start, stop) in self._spans(place):
                debt = self._debts.get(key)
                if debt is not None and len(debt) == stop - start:
                    own[start:stop] = self._debts.pop(key)
            found = self._at[place] = Residual(own, torch.zeros_like(self._mine(flat)), self._rounds)
        found.own, found.owned = found.own.to(flat.device), found.owned.to(flat.device)
        if self.guarded and not found.before:
            found.before = [found.own.clone(), found.owned.clone()]
        return found

    # ---- tensors in other flat ones ---------------------------------------------------------------------------------

    def lay(self, rows: Sequence[Row]) -> None:
        """Put the tensors of rows[k] into flat tensor k from now on; the residual of each tensor moves along."""
        if self._rows == (now := tuple(rows)):
            return
        lengths = {place: sum(elements for _, elements in row) for place, row in enumerate(now)}
        if not self._rows and {place: len(residual.own) for place, residual in self._at.items()} == lengths:
            self._rows = now  # residuals of a checkpoint that doesn't name its tensors, and may mean these
            return
        for place in [place for place in self._at if place < len(self._rows)]:
            residual = self._at.pop(place)
            self._rounds = max(self._rounds, residual.rounds)
            for key, (start, stop) in self._spans(place):
                # e + n f: the owner's residual f becomes one of this worker's, which counts 1/n in the mean.
                debt = self._debts[key] = residual.own[start:stop].clone()
                for there, mine in self._overlap(len(residual.own), (start, stop)):
                    debt[there].add_(residual.owned[mine], alpha=self._parts.size)
        self._rows, self._at = now, {}

    # ---- unused means -----------------------------------------------------------------------------------------------

    def put_back(self, flat: Tensor, place: int, unused: Collection[int]) -> None:
        """Put unused means back: f <- f + r for the tensors with these numbers, r their mean in `flat`."""
        residual, mean = self._at[place], self._mine(flat)
        for number, (_, span) in enumerate(self._spans(place)):
            for _, mine in self._overlap(flat.numel(), span) if number in unused else ():
                residual.owned[mine].add_(mean[mine])

    def _restore(self, place: int, residual: Residual, into: Sequence[Tensor], keys: Collection[int]) -> None:
        """Restore the residuals of before the last mean for the tensors with these keys."""
        for key, span in self._spans(place) if residual.before and not residual.taken else ():
            if key in keys:
                into[0][slice(*span)] = residual.before[0][slice(*span)]
                for _, mine in self._overlap(len(residual.own), span):
                    into[1][mine] = residual.before[1][mine]

    # ---- skipped updates --------------------------------------------------------------------------------------------

    def guard(self, scale: Callable[[], Tensor] | None, scaled: bool = True) -> None:
        """Expect updates to be skipped from now on, by a loss scaler or otherwise; `scaled`: whether gradients are
        multiplied by the scale."""
        self.guarded, self._scale, self._scaled = True, scale, scaled

    def updated(self, keys: Keys, skipped: bool) -> None:
        """Record that an update of the tensors with these keys was due; `skipped`: known to be skipped."""
        if not self.guarded:
            self.guarded = skipped  # the first skipped update of a run in which none was expected
            return
        self._any = True
        if skipped:
            self._withdraw(keys())
        if self._scale is not None:
            self._open.append((keys, AsyncRead(self._scale())))

    def settle(self) -> None:
        """Accept or withdraw the last means, before the next."""
        if self._scale is not None and not self._known:
            self._come_at(float(self._scale()))
            self._known = True
        if self._any:
            self._any = False
            self._settle_scales()
            for residual in self._at.values():
                residual.taken = True

    def _settle_scales(self) -> None:
        """Withdraw the means whose updates a loss scaler has skipped; means still to be used stay."""
        reads, self._open = self._open, []
        last = self._unit
        for keys, read in reads:
            before, last = last, float(read.read())
            if last < before:
                self._withdraw(keys())
        self._come_at(last)

    def _withdraw(self, keys: Collection[int]) -> None:
        for place, residual in self._at.items():
            self._restore(place, residual, [residual.own, residual.owned], keys)

    def _come_at(self, scale: float) -> None:
        """Convert residuals to the scale by which gradients are multiplied from now on."""
        if self._scaled and self._unit not in (0.0, scale):
            kept = [tensor for residual in self._at.values() for tensor in (residual.own, residual.owned)]
            for tensor in (*kept, *self._debts.values()):
                tensor.mul_(scale / self._unit)
        self._unit = scale

    def forget(self) -> None:
        self._at, self._debts = {}, {}

    def state_dict(self, untaken: Collection[int] = ()) -> dict[str, Any]:
        """Return the state; tensors with keys in `untaken`, whose mean no update has used, have the residuals of before
        that mean, since a resumed run won't have it."""
        self._settle_scales()
        without = {place: [residual.own.clone(), residual.owned.clone()] for place, residual in self._at.items()}
        for place, copies in without.items():
            self._restore(place, self._at[place], copies, untaken)
        return {
            "residuals": {str(place): [*copies, self._at[place].rounds] for place, copies in without.items()},
            "guarded": self.guarded,
            "rows": [[list(pair) for pair in row] for row in self._rows],
            "debts": {str(key): debt.clone() for key, debt in self._debts.items()},
            "rounds": self._rounds,
            "scale": self._unit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore residuals in the scale of the file; the loss scaler is restored later."""
        now = self._rows
        self._at = {int(place): Residual(*row) for place, row in state["residuals"].items()}
        self._rows = tuple(tuple((key, elements) for key, elements in row) for row in state.get("rows", ()))
        self._debts = {int(key): debt for key, debt in state.get("debts", {}).items()}
        self._rounds, self.guarded = state.get("rounds", 0), self.guarded or state.get("guarded", False)
        self._open, self._any, self._known, self._unit = [], False, False, state.get("scale", 0.0)
        if now:
            self.lay(now)

    # ---- where a tensor lies ----------------------------------------------------------------------------------------

    def _spans(self, place: int) -> Iterator[tuple[int, Span]]:
        """Yield (key, (start, stop)) of the tensors in flat tensor number `place`."""
        row = self._rows[place] if place < len(self._rows) else ()
        for (key, elements), stop in zip(row, accumulate(elements for _, elements in row), strict=True):
            yield key, (stop - elements, stop)

    def _mine(self, flat: Tensor) -> Tensor:
        return self._parts.of(self._parts.rank, flat)

    def _overlap(self, length: int, span: Span) -> Iterator[tuple[slice, slice]]:
        """Yield the overlap of a tensor with this worker's part of a flat one: (slice of the tensor, of the part)."""
        begin, end = self._parts.spans(length)[self._parts.rank]
        start, stop = max(begin, span[0]), min(end, span[1])
        if start < stop:
            yield slice(start - span[0], stop - span[0]), slice(start - begin, stop - begin)


def scale_of(scaler: Any, device: torch.device) -> Callable[[], Tensor] | None:
    """Return a function to the loss scaler's present factor, on its device; None without a scaler."""
    return None if scaler is None else lambda: scaler.scale(torch.ones((), device=device))
