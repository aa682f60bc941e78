"""Flight: one round between launch and landing, bucket by bucket; saved with what has come of it, and restored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_decentral.gossip.compute.integrity import Sick
from lightning_decentral.gossip.wire.exchange import Landed, Started


@dataclass
class Flight:
    """The one place that knows what was started in a round."""

    round: int
    step: int
    sent: list[Tensor] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)

    def state_dict(self, kept: Callable[[int], Landed]) -> dict[str, Any]:
        """State to save, as tensors and primitives.

        Args:
            kept: what came for the bucket at this place. A round arrives once, so it stands in for what was started.
        """
        landed = [kept(place) for place in range(len(self.started))]
        self.started = [*landed]
        return {
            "round": self.round,
            "step": self.step,
            "sent": list(self.sent),
            "mixed": [one.mixed for one in landed],
            "differences": [one.corrects for one in landed],
            "refused": [one.sick and one.sick.state_dict() for one in landed],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], like: Sequence[Tensor]) -> "Flight":
        """Flight as it was saved, on the devices of the buckets."""
        mixed = state["mixed"]
        # In checkpoints from before there were any, none.
        differences = state.get("differences", [False] * len(mixed))
        refused = state.get("refused", [None] * len(mixed))
        landed = [
            Landed(_copies(tensors, [x] * len(tensors)), corrects=of, sick=said and _sick(said, x))
            for tensors, of, said, x in zip(mixed, differences, refused, like, strict=False)
        ]
        return cls(state["round"], state["step"], _copies(state["sent"], like), [*landed])


def _sick(said: Mapping[str, Any], like: Tensor) -> Sick:
    tensors = {name: _copies(said[name], [like] * len(said[name])) for name in ("sent", "mixed")}
    return Sick(**{**said, **tensors})


def _copies(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    # A flight may be older than the last buckets, and then shorter than `like`.
    return [tensor.to(x.device, copy=True) for tensor, x in zip(tensors, like, strict=False)]
