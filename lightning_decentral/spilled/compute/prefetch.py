"""Prefetch (double buffering): which shards are on the device, the one that computes and the one that comes next.

Before there is a plan, `Log` profiles a step: seconds, peak bytes and bytes sent of every visit to a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_decentral.spilled.compute.transfer import Copies, OffloadDevice
from lightning_decentral.spilled.plan.shards import BlockFootprint, Footprint, ShardPlan, Visit

if TYPE_CHECKING:
    import lightning_decentral.spilled.compute.spill as spill

Shard = tuple[int, ...]


class Loader:
    """Copies of parameters on a device, shard by shard.

    Attributes:
        hosts: the parameters themselves, by name.
        runs: calls whose backward is still to come, the next one last.
        log: of the step, while it is measured.
        in_step: whether a step's forward or backward runs.
    """

    def __init__(self, device: OffloadDevice, blocks: Sequence[Sequence[str]]) -> None:
        self.device = device
        self.hosts: dict[str, Tensor] = {}
        self.runs: list[spill.Run] = []
        self.log: Log | None = None
        self.in_step = False
        self._blocks = blocks  # the names of each block's parameters
        self._plan: ShardPlan | None = None  # without one every block is a shard, and none comes early
        self._next = 0  # the first of the plan's visits that may come
        self._present: dict[str, Copies] = {}
        self._leaving: list[Copies] = []  # sent in this visit
        self._left: list[Copies] = []  # sent in the one before

    @property
    def checks(self) -> bool:
        """True where blocks are compared with their second run."""
        return self.log is not None and self.log.checks

    def begin(self, plan: ShardPlan | None, checks: bool) -> None:
        """Begin a step, from nothing, by a plan; None: it is measured, and with `checks` blocks are compared."""
        self.end()
        self._plan, self._next, self.in_step = plan, 0, True
        if plan is None:
            self.log = Log(self.device, checks)
        elif plan.route:
            self._load(plan.shards[plan.route[0]])  # nothing computes yet that it could hide behind

    def end(self) -> None:
        """End the step with nothing left on the device: the next one has other parameters."""
        self.device.settle()
        self._land(everything=True)
        if self.log is not None:
            self.log.close()
        self._keep(())
        self.runs = []
        self._plan, self.log, self.in_step = None, None, False

    def enter(self, block: int, run: spill.Run | None = None) -> dict[str, Tensor]:
        """Copies of the block's parameters, by name; `run`: the call whose backward this is."""
        self.device.settle()  # what is given back below isn't used any more, so that it never adds to what comes
        self._land(everything=self._plan is None)
        if self.log is not None:
            self.log.close()
        shard, coming = self._step(block, run is not None)
        # Of the block that was visited last, too; not outside of steps, where parameters may change.
        self._keep((*shard, *coming) if self.in_step else ())
        came_bytes = self._load(shard)
        copies = {name: self._present[name].ready()[0] for name in self._blocks[block]}
        if self.log is not None:
            self.log.open(block, run is not None, self._bytes(self._present), came_bytes)
        self._load(coming)  # behind what this visit waits for: one stream copies both
        if run is not None:
            if run in self.runs:
                self.runs.remove(run)
            if self._plan is not None and self.runs:  # inputs of the next backward come while this one computes
                self.runs[-1].prefetch()
        return copies

    def _step(self, block: int, backward: bool) -> tuple[Shard, Shard]:
        """(the shard of this visit, the one that comes)."""
        if self._plan is None:
            return (block,), ()
        plan, visits = self._plan, self._plan.footprint.visits
        ahead = range(self._next, len(visits))
        here = next((i for i in ahead if (visits[i].block, visits[i].backward) == (block, backward)), None)
        if here is None:  # the step has left the route: nothing is loaded early
            shard = plan.shard_of.get(block)
            return ((block,) if shard is None else plan.shards[shard]), ()
        self._next, coming = here + 1, plan.coming[here]
        return plan.shards[plan.route[here]], () if coming is None else plan.shards[coming]

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Copies:
        """Send tensors to the host; they have arrived by the end of the next visit."""
        leaving = self.device.send(tensors, like)
        self._leaving.append(leaving)
        if self.log is not None:
            self.log.sends(tensors)
        return leaving

    def _land(self, everything: bool) -> None:
        # What was sent two visits ago: its copies had the visit between to hide behind.
        due = [*self._left, *(self._leaving if everything else [])]
        self._left, self._leaving = [] if everything else self._leaving, []
        for leaving in due:
            leaving.land()

    def _load(self, shard: Shard) -> int:
        """Start to copy what isn't there; its bytes."""
        missing = [name for name in self._names(shard) if name not in self._present]
        for name in missing:
            self._present[name] = self.device.fetch([self.hosts[name]])
        return self._bytes(missing)

    def _keep(self, blocks: Shard) -> None:
        kept = self._names(blocks)
        for name in [name for name in self._present if name not in kept]:
            self._present.pop(name).ready()  # memory that is still written to isn't given back

    def _names(self, blocks: Shard) -> dict[str, None]:
        return dict.fromkeys(name for block in blocks for name in self._blocks[block])

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self.hosts[name].numel() * self.hosts[name].element_size() for name in names)


class Log:
    """Measures a step's visits while every block is loaded alone, and all copying is waited for.

    A visit lasts until the next one begins. Its `other_bytes` are the device's peak less the parameters loaded for it.
    """

    def __init__(self, device: OffloadDevice, checks: bool) -> None:
        self.checks = checks  # whether blocks are compared with their second run
        self.visits: list[Visit] = []
        self.opening_bytes = 0
        self._device = device
        self._load_bytes, self._load_seconds = 0, 0.0
        self._open: Visit | None = None  # one that hasn't ended
        self._began = self._closed = 0.0
        self._loaded_bytes = self._before_bytes = 0  # when it began: of parameters, and of everything
        device.forget_peak()

    def close(self) -> None:
        """A visit ends."""
        self._closed = self._device.now()
        peak, visit = self._device.peak_bytes(), self._open  # the peak since `open`
        if visit is None:
            self.opening_bytes = max(peak, self.opening_bytes)
            return
        seconds, other = self._closed - self._began, peak - self._loaded_bytes
        self.visits.append(replace(visit, seconds=seconds, other_bytes=other))
        self._open = None

    def open(self, block: int, backward: bool, loaded_bytes: int, came_bytes: int) -> None:
        """A visit begins, with so many bytes of parameters on the device, of which some just came."""
        self._began = self._device.now()
        self._load_bytes += came_bytes  # over all visits: the rate of the link is one number
        # Since `close`, loads alone were waited for.
        self._load_seconds += self._began - self._closed if came_bytes else 0.0
        self._device.forget_peak()
        self._loaded_bytes, self._before_bytes = loaded_bytes, self._device.present_bytes()
        self._open = Visit(block, backward, 0.0, 0)

    def sends(self, tensors: Sequence[Tensor]) -> None:
        if self._open is not None:
            sent_bytes = self._open.sent_bytes + sum(t.numel() * t.element_size() for t in tensors)
            self._open = replace(self._open, sent_bytes=sent_bytes)

    def ran_again(self) -> None:
        """The forward of a visit of a backward has run."""
        if self._open is not None:
            again_seconds, saved_bytes = self._device.now() - self._began, self._device.present_bytes()
            saved_bytes -= self._before_bytes
            self._open = replace(self._open, again_seconds=again_seconds, saved_bytes=saved_bytes)

    def footprint(self, blocks: Sequence[BlockFootprint]) -> Footprint:
        rate = self._load_bytes / max(self._load_seconds, 1e-9)
        # Each backward gets back the bytes of inputs that the forward it belongs to had sent.
        visits, sent = self.visits, dict[int, list[int]]()
        for i, visit in enumerate(visits):
            if visit.backward:
                visits[i] = replace(visit, awaited_bytes=(sent.get(visit.block) or [0]).pop())
            else:
                sent.setdefault(visit.block, []).append(visit.sent_bytes)
        return Footprint(tuple(blocks), tuple(visits), self.opening_bytes, max(rate, 1.0), self._device.overlaps)


def joined(first: Footprint, second: Footprint) -> Footprint | None:
    """The second step's seconds, and the bytes of whichever step had more; None where they went different ways."""
    if [(v.block, v.backward) for v in first.visits] != [(v.block, v.backward) for v in second.visits]:
        return None
    pairs = zip(first.visits, second.visits, strict=True)
    # On the CPU a second step counts nothing but copies.
    visits = tuple(
        replace(w, other_bytes=max(v.other_bytes, w.other_bytes), saved_bytes=v.saved_bytes) for v, w in pairs
    )
    return replace(second, visits=visits, opening_bytes=max(first.opening_bytes, second.opening_bytes))
