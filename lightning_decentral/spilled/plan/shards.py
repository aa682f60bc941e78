"""Shard plan of CPU offload: consecutive blocks are loaded together; one shard computes while the next is loaded.

    T = load_1 + sum_i max(compute_i, load_{i+1})
    bytes at visit v = other_v + sent_{v-1} + awaited_{v+1} + bytes(shard(v) and the next one) <= budget

A step visits its blocks in forward order and then, in general, in backward order. Its `Footprint` has the measurements,
block by block.

Source: spilling and double buffering, Nagrecha et al. 2110.08633."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

Shards = tuple[tuple[int, ...], ...]
MOST_CAPS = 200  # sizes of shards that are tried; one for each block would be quadratically many


@dataclass(frozen=True)
class BlockFootprint:
    """Measured block: consecutive layers that are loaded together."""

    name: str
    parameters: Mapping[str, int]  # bytes by name; a shared parameter has one name

    @property
    def parameter_bytes(self) -> int:
        return sum(self.parameters.values())


@dataclass(frozen=True)
class Visit:
    """Measured visit of a step to a block, until the visit to the next block."""

    block: int  # its index among the blocks
    backward: bool  # whether it computes the forward again and then the backward
    seconds: float  # seconds without waits for loads
    other_bytes: int  # maximum on the device in addition to loaded parameters: activations, gradients, resident tensors
    sent_bytes: int = 0  # bytes still being copied to the host when the next visit begins
    awaited_bytes: int = 0  # bytes of inputs that are loaded from the host during the previous visit
    again_seconds: float = 0.0  # part of `seconds`: the forward's second run
    saved_bytes: int = 0  # bytes that the second run saves for the backward


@dataclass(frozen=True)
class Footprint:
    """Measurements of one step, block by block."""

    blocks: tuple[BlockFootprint, ...]
    visits: tuple[Visit, ...]
    opening_bytes: int  # bytes on the device before the first visit
    bytes_per_second: float  # bandwidth of the link between host and device
    overlaps: bool = True  # whether the device computes while parameters are loaded

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all blocks' parameters, each parameter once."""
        return self.bytes_of(range(len(self.blocks)))

    @property
    def plain_bytes(self) -> int:
        """Upper estimate of bytes for the step without spilling: parameters, gradients, all saved tensors at once."""
        saved = sum(visit.saved_bytes for visit in self.visits)
        return 2 * self.parameter_bytes + saved + max((visit.other_bytes for visit in self.visits), default=0)

    @property
    def order(self) -> tuple[int, ...]:
        """Visited blocks in the order of their first visits."""
        return tuple(dict.fromkeys(visit.block for visit in self.visits))

    def bytes_of(self, blocks: Collection[int]) -> int:
        """Bytes of these blocks' parameters, each parameter once."""
        return sum({k: v for block in blocks for k, v in self.blocks[block].parameters.items()}.values())


def double_buffered(loads_seconds: Sequence[float], computes_seconds: Sequence[float]) -> float:
    """T = load_1 + sum_i max(compute_i, load_{i+1}): the next piece is loaded while this one computes. ValueError: not
    one load for each piece."""
    if len(loads_seconds) != len(computes_seconds):
        raise ValueError(
            f"{len(loads_seconds)} loads for {len(computes_seconds)} computations: give every piece one of each"
        )
    coming = [*loads_seconds[1:], 0.0]
    return sum(map(max, computes_seconds, coming), start=loads_seconds[0] if loads_seconds else 0.0)


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of blocks to shards, whose parameters are loaded together."""

    footprint: Footprint
    shards: Shards

    @cached_property
    def shard_of(self) -> dict[int, int]:
        return {block: shard for shard, blocks in enumerate(self.shards) for block in blocks}

    @cached_property
    def shard_bytes(self) -> list[int]:
        return [self._bytes_of(shard) for shard in range(len(self.shards))]

    @cached_property
    def route(self) -> list[int]:
        return [self.shard_of[visit.block] for visit in self.footprint.visits]

    @cached_property
    def coming(self) -> list[int | None]:
        """[visit]: the next different shard on the route; None at the end."""
        stays = [list(stay) for _, stay in groupby(self.route)]
        after = [*(stay[0] for stay in stays[1:]), None]
        return [shard for stay, shard in zip(stays, after, strict=False) for _ in stay]

    @cached_property
    def loaded_bytes(self) -> list[int]:
        """Bytes of parameters on the device at every visit: of its shard and of the shard that is loaded."""
        pairs = zip(self.route, self.coming, strict=True)
        return [self._bytes_of(now, now if then is None else then) for now, then in pairs]

    @cached_property
    def needs_bytes(self) -> list[int]:
        """[visit]: maximum bytes on the device."""
        visits = self.footprint.visits
        sent = [0, *(visit.sent_bytes for visit in visits)]
        awaited = [*(visit.awaited_bytes for visit in visits[1:]), 0]
        rows = zip(visits, sent, awaited, self.loaded_bytes, strict=False)
        return [visit.other_bytes + leaving + coming + loaded for visit, leaving, coming, loaded in rows]

    @property
    def peak_bytes(self) -> int:
        opening = self.footprint.opening_bytes + (self.shard_bytes[self.route[0]] if self.route else 0)
        return max([opening, *self.needs_bytes])

    @property
    def load_bytes(self) -> list[int]:
        """Bytes of parameters loaded for each stay at a shard, but for parameters of the two stays before."""
        stays = [(shard,) for shard, _ in self._stays()]
        there = [(), *stays[:1], *(a + b for a, b in pairwise(stays))]
        return [
            self._bytes_of(*now, *before) - self._bytes_of(*before) for now, before in zip(stays, there, strict=False)
        ]

    @property
    def seconds(self) -> float:
        """Predict the seconds T of a step on this route."""
        loads = [size / self.footprint.bytes_per_second for size in self.load_bytes]
        computes = [seconds for _, seconds in self._stays()]
        return double_buffered(loads, computes) if self.footprint.overlaps else sum(loads) + sum(computes)

    @cached_property
    def _bytes_of(self) -> Callable[..., int]:
        """Bytes of these shards' parameters, each parameter once."""
        blocks = self.shards
        return cache(lambda *shards: self.footprint.bytes_of([block for shard in shards for block in blocks[shard]]))

    def _stays(self) -> list[tuple[int, float]]:
        """Return (shard, seconds) of consecutive visits to one shard."""
        rows = zip(self.route, self.footprint.visits, strict=True)
        return [(shard, sum(visit.seconds for _, visit in stay)) for shard, stay in groupby(rows, itemgetter(0))]


def plan(footprint: Footprint, budget_bytes: int) -> ShardPlan:
    """Find the fastest plan that fits; of equally fast plans, the plan with the fewest shards. ValueError: not even
    single blocks fit (names the block, its bytes, the least budget)."""
    finest = ShardPlan(footprint, tuple((block,) for block in footprint.order))
    _refuse(finest, budget_bytes)  # shards of one block need the least: a budget too small for them is too small
    sizes = [footprint.blocks[block].parameter_bytes for block in footprint.order]
    sums = {total for start in range(len(sizes)) for total in accumulate(sizes[start:]) if total <= budget_bytes}
    caps = sorted(sums)[:: max(1, len(sums) // MOST_CAPS)]  # total sizes of consecutive blocks
    packed = {_packed(footprint, cap) for cap in caps}
    others = [ShardPlan(footprint, shards) for shards in packed if shards != finest.shards]
    fitting = [finest, *(other for other in others if other.peak_bytes <= budget_bytes)]
    return min(fitting, key=lambda found: (found.seconds, len(found.shards), found.shards))


def _packed(footprint: Footprint, cap_bytes: int) -> Shards:
    """Make shards as long as they stay within the cap."""
    packs: list[tuple[int, ...]] = [()]
    for block in footprint.order:
        if packs[-1] and footprint.bytes_of([*packs[-1], block]) > cap_bytes:
            packs.append(())
        packs[-1] = (*packs[-1], block)
    return tuple(packs)


def _refuse(finest: ShardPlan, budget_bytes: int) -> None:
    """Raise ValueError if blocks that are loaded alone need more than the budget."""
    footprint, least = finest.footprint, finest.peak_bytes
    if least <= budget_bytes:
        return
    remedy = f"give memory_bytes of at least {least}, smaller batches, or smaller blocks (blocks=[names])"
    if least not in finest.needs_bytes:
        raise ValueError(
            f"{footprint.opening_bytes} bytes are on the device before the first block, so the step needs {least}, "
            f"over memory_bytes={budget_bytes}: {remedy}"
        )
    visit = finest.needs_bytes.index(least)
    block, after = footprint.blocks[footprint.visits[visit].block], finest.coming[visit]
    own, both = block.parameter_bytes, finest.loaded_bytes[visit]
    coming = "" if after is None else footprint.blocks[finest.shards[after][0]].name
    then = f", {both - own} for {coming}, which is loaded meanwhile" if coming else ""
    raise ValueError(
        f"block {block.name} needs {least} bytes of the device ({own} for its parameters{then}, {least - both} for "
        f"activations, gradients and resident tensors), over memory_bytes={budget_bytes}: {remedy}"
    )


STATES = 2  # tensors in an optimizer's state for each parameter, as in Adam


def summary(plan: ShardPlan, budget_bytes: int | None) -> dict[str, str]:
    """Describe a plan for the user when training begins, line by line."""
    footprint, limit = plan.footprint, "no limit" if budget_bytes is None else size(budget_bytes)
    # A step without loads and repeated computing would take the rest.
    lost = max(0.0, plan.seconds - sum(visit.seconds - visit.again_seconds for visit in footprint.visits))
    names = [[footprint.blocks[block].name for block in blocks] for blocks in plan.shards]
    spans = [row[0] if len(row) == 1 else f"{row[0]} ... {row[-1]} ({len(row)} blocks)" for row in names]
    lines = {
        "shards": f"{len(plan.shards)} of {len(footprint.order)} blocks, parameters {size(footprint.parameter_bytes)}",
        **{f"shard {i}": f"{spans[i]}, {size(plan.shard_bytes[i])}" for i in range(len(names))},
        "peak": f"{size(plan.peak_bytes)} on the device, predicted, of {limit}",
        "seconds": f"{plan.seconds:.3g} a step, predicted, without the update; {lost:.3g} of them lost to "
        "loading and to computing forwards twice",
    }
    # Whether everything would fit at once, with an optimizer's state like Adam's.
    if budget_bytes is None or footprint.plain_bytes + STATES * footprint.parameter_bytes <= budget_bytes:
        lines["advice"] = "the model fits: use the plain strategy"
    return lines


def size(number_bytes: float) -> str:
    """Format bytes in MiB."""
    return f"{number_bytes / 2**20:.4g} MiB"
