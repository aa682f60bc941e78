"""Prefetch (double buffering): one shard's parameters are on the device for computing, the next shard's are loaded.

Before there is a plan, `Log` profiles a step: seconds, peak bytes and sent bytes of every visit to a block."""

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
    """Loads copies of parameters to a device, shard by shard."""

    def __init__(self, device: OffloadDevice, blocks: Sequence[Sequence[str]]) -> None:
        self.device = device
        self.hosts: dict[str, Tensor] = {}  # the parameters themselves, by name
        self.runs: list[spill.Run] = []  # calls whose backward is still to come, the next one last
        self.log: Log | None = None  # of the step, while it is measured
        self.in_step = False  # whether a step's forward or backward runs
        self._blocks = blocks  # the names of each block's parameters
        self._plan: ShardPlan | None = None  # without a plan every block is a shard, and none is loaded ahead
        self._next = 0  # the first of the plan's visits that may be loaded
        self._present: dict[str, Copies] = {}
        self._leaving: list[Copies] = []  # copies sent in this visit
        self._left: list[Copies] = []  # copies sent in the previous visit

    @property
    def checks(self) -> bool:
        """True if blocks are compared with their second run."""
        return self.log is not None and self.log.checks

    def begin(self, plan: ShardPlan | None, checks: bool) -> None:
        """Begin a step by a plan; None: the step is measured, and with `checks` blocks are compared."""
        self.end()
        self._plan, self._next, self.in_step = plan, 0, True
        if plan is None:
            self.log = Log(self.device, checks)
        elif plan.route:
            self._load(plan.shards[plan.route[0]])  # nothing computes yet to overlap with

    def end(self) -> None:
        """End the step with nothing left on the device: parameters change before the next step."""
        self.device.settle()
        self._land(everything=True)
        if self.log is not None:
            self.log.close()
        self._keep(())
        self.runs = []
        self._plan, self.log, self.in_step = None, None, False

    def enter(self, block: int, run: spill.Run | None = None) -> dict[str, Tensor]:
        """Return copies of the block's parameters, by name; `run`: the call whose backward this is."""
        self.device.settle()  # memory freed below isn't used any more, so it never adds to what is loaded
        self._land(everything=self._plan is None)
        if self.log is not None:
            self.log.close()
        shard, coming = self._step(block, run is not None)
        # Also of the block visited last; not outside of steps, where parameters may change.
        self._keep((*shard, *coming) if self.in_step else ())
        came_bytes = self._load(shard)
        copies = {name: self._present[name].ready()[0] for name in self._blocks[block]}
        if self.log is not None:
            self.log.open(block, run is not None, self._bytes(self._present), came_bytes)
        self._load(coming)  # after the loads that this visit waits for: one stream copies both
        if run is not None:
            if run in self.runs:
                self.runs.remove(run)
            if self._plan is not None and self.runs:  # inputs of the next backward are loaded while this one computes
                self.runs[-1].prefetch()
        return copies

    def _step(self, block: int, backward: bool) -> tuple[Shard, Shard]:
        """Return (the shard of this visit, the shard to load)."""
        if self._plan is None:
            return (block,), ()
        plan, visits = self._plan, self._plan.footprint.visits
        ahead = range(self._next, len(visits))
        here = next((i for i in ahead if (visits[i].block, visits[i].backward) == (block, backward)), None)
        if here is None:  # the step has left the route: nothing is loaded ahead
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
        # Copies sent two visits ago: they overlapped with the visit between.
        due = [*self._left, *(self._leaving if everything else [])]
        self._left, self._leaving = [] if everything else self._leaving, []
        for leaving in due:
            leaving.land()

    def _load(self, shard: Shard) -> int:
        """Start to copy the shard's parameters that aren't on the device; return their bytes."""
        missing = [name for name in self._names(shard) if name not in self._present]
        for name in missing:
            self._present[name] = self.device.fetch([self.hosts[name]])
        return self._bytes(missing)

    def _keep(self, blocks: Shard) -> None:
        kept = self._names(blocks)
        for name in [name for name in self._present if name not in kept]:
            self._present.pop(name).ready()  # memory that is still written to isn't freed

    def _names(self, blocks: Shard) -> dict[str, None]:
        return dict.fromkeys(name for block in blocks for name in self._blocks[block])

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self.hosts[name].numel() * self.hosts[name].element_size() for name in names)


class Log:
    """Measures a step's visits while every block is loaded alone, and waits for all copies.

    A visit lasts until the next begins. Its `other_bytes` are the device's peak less the parameters loaded for it."""

    def __init__(self, device: OffloadDevice, checks: bool) -> None:
        self.checks = checks  # whether blocks are compared with their second run
        self.visits: list[Visit] = []
        self.opening_bytes = 0
        self._device = device
        self._load_bytes, self._load_seconds = 0, 0.0
        self._open: Visit | None = None  # the visit that hasn't ended
        self._began = self._closed = 0.0
        self._loaded_bytes = self._before_bytes = 0  # bytes when the visit began: of parameters, and of all tensors
        device.forget_peak()

    def close(self) -> None:
        self._closed = self._device.now()
        peak, visit = self._device.peak_bytes(), self._open  # the peak since `open`
        if visit is None:
            self.opening_bytes = max(peak, self.opening_bytes)
            return
        seconds, other = self._closed - self._began, peak - self._loaded_bytes
        self.visits.append(replace(visit, seconds=seconds, other_bytes=other))
        self._open = None

    def open(self, block: int, backward: bool, loaded_bytes: int, came_bytes: int) -> None:
        """Record that a visit begins, with the bytes of parameters on the device, and of those just loaded."""
        self._began = self._device.now()
        self._load_bytes += came_bytes  # over all visits: the bandwidth of the link is one number
        # Since `close`, the device has only waited for loads.
        self._load_seconds += self._began - self._closed if came_bytes else 0.0
        self._device.forget_peak()
        self._loaded_bytes, self._before_bytes = loaded_bytes, self._device.present_bytes()
        self._open = Visit(block, backward, 0.0, 0)

    def sends(self, tensors: Sequence[Tensor]) -> None:
        if self._open is not None:
            sent_bytes = self._open.sent_bytes + sum(t.numel() * t.element_size() for t in tensors)
            self._open = replace(self._open, sent_bytes=sent_bytes)

    def ran_again(self) -> None:
        """Record that the forward of a backward's visit has run."""
        if self._open is not None:
            again_seconds, saved_bytes = self._device.now() - self._began, self._device.present_bytes()
            saved_bytes -= self._before_bytes
            self._open = replace(self._open, again_seconds=again_seconds, saved_bytes=saved_bytes)

    def footprint(self, blocks: Sequence[BlockFootprint]) -> Footprint:
        rate = self._load_bytes / max(self._load_seconds, 1e-9)
        # Each backward loads the bytes of inputs that its forward had sent.
        visits, sent = self.visits, dict[int, list[int]]()
        for i, visit in enumerate(visits):
            if visit.backward:
                visits[i] = replace(visit, awaited_bytes=(sent.get(visit.block) or [0]).pop())
            else:
                sent.setdefault(visit.block, []).append(visit.sent_bytes)
        return Footprint(tuple(blocks), tuple(visits), self.opening_bytes, max(rate, 1.0), self._device.overlaps)


def joined(first: Footprint, second: Footprint) -> Footprint | None:
    """Join the second step's seconds with the larger bytes of both steps; None if their routes differ."""
    if [(v.block, v.backward) for v in first.visits] != [(v.block, v.backward) for v in second.visits]:
        return None
    pairs = zip(first.visits, second.visits, strict=True)
    # On the CPU a second step counts nothing but copies.
    visits = tuple(
        replace(w, other_bytes=max(v.other_bytes, w.other_bytes), saved_bytes=v.saved_bytes) for v, w in pairs
    )
    return replace(second, visits=visits, opening_bytes=max(first.opening_bytes, second.opening_bytes))
