"""Memory footprint of a training step, block by block, as it was measured: plans of CPU offload read it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockFootprint:
    """Consecutive layers that are loaded together.

    Args:
        parameters: bytes by name; a parameter that blocks share has one name.
    """

    name: str
    parameters: Mapping[str, int]

    @property
    def parameter_bytes(self) -> int:
        return sum(self.parameters.values())


@dataclass(frozen=True)
class Visit:
    """One time that a step comes to a block, until it comes to the next one.

    Args:
        block: which one, by its place among the blocks.
        backward: whether it computes the forward again and then the backward.
        seconds: without waiting for any load.
        other_bytes: that the device holds at most besides loaded parameters: activations, gradients, what stays.
        sent_bytes: on their way to the host when the next visit begins.
        awaited_bytes: of inputs that come from the host while the visit before computes.
        again_seconds: of `seconds`, those of the forward's second run.
        saved_bytes: what the second run saved for the backward.
    """

    block: int
    backward: bool
    seconds: float
    other_bytes: int
    sent_bytes: int = 0
    awaited_bytes: int = 0
    again_seconds: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """One step as it was measured, block by block.

    Args:
        opening_bytes: on the device before the first visit.
        bytes_per_second: of the link between host and device.
        overlaps: whether the device computes while parameters come.
    """

    blocks: tuple[BlockFootprint, ...]
    visits: tuple[Visit, ...]
    opening_bytes: int
    bytes_per_second: float
    overlaps: bool = True

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all blocks' parameters, each once."""
        return self.bytes_of(range(len(self.blocks)))

    @property
    def plain_bytes(self) -> int:
        """An upper estimate for the same step without spilling: parameters, gradients, everything saved at once."""
        saved = sum(visit.saved_bytes for visit in self.visits)
        return 2 * self.parameter_bytes + saved + max((visit.other_bytes for visit in self.visits), default=0)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step without loads and without computing anything twice."""
        return sum(visit.seconds - visit.again_seconds for visit in self.visits)

    @property
    def order(self) -> tuple[int, ...]:
        """The visited blocks in the order of their first visits."""
        return tuple(dict.fromkeys(visit.block for visit in self.visits))

    def bytes_of(self, blocks: Collection[int]) -> int:
        """Bytes of these blocks' parameters, each once."""
        return sum({k: v for block in blocks for k, v in self.blocks[block].parameters.items()}.values())
