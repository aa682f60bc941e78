"""Profile of a model on a device and of a network between hosts: what was measured, as one readable JSON file.

seconds(operation, bytes) = latency + bytes / bandwidth

Forecasts read it; this module measures nothing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_decentral.shared.plan.arguments import text_of

FORMAT = "lightning_decentral profile"
VERSION = 1
ALWAYS_MEASURED = ("name", "forward_seconds", "backward_seconds", "update_seconds", "parameter_bytes")


Sides = tuple[int, int]  # (shorter side, longer side) of a matrix.


@dataclass(frozen=True)
class BlockCost:
    """Cost of a block of a model in one training step: seconds, bytes of parameters, bytes saved for the backward pass.

    Unmeasured numbers are 0.

    Args:
        hidden: sides of the matrices that `optim.Muon` would orthogonalize.
    """

    name: str = ""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    hidden: tuple[Sides, ...] = ()

    @property
    def pass_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class RoundWork:
    """Device work of a round of gossip without the network: to copy or encode, decode, mix and correct.

    seconds = round_seconds + received message_seconds                                  0 where nothing is received
            + bytes of the parameters (own_seconds_per_byte + received heard_seconds_per_byte)

    Raises:
        ValueError: seconds below 0.
    """

    codec: str  # repr of the codec, `Plain()` for uncompressed messages
    own_seconds_per_byte: float = 0.0
    heard_seconds_per_byte: float = 0.0
    round_seconds: float = 0.0  # those of a round that don't depend on the message's length: threads, headers
    message_seconds: float = 0.0  # such seconds for each neighbour's message

    def __post_init__(self) -> None:
        if not min(self.own_seconds_per_byte, self.heard_seconds_per_byte) >= 0:
            raise ValueError(
                f"a round with {self.codec} can't take {self.own_seconds_per_byte} s per byte "
                f"and {self.heard_seconds_per_byte} s for each neighbour's"
            )
        if not min(self.round_seconds, self.message_seconds) >= 0:
            raise ValueError(
                f"a round with {self.codec} can't take {self.round_seconds} s and {self.message_seconds} s a message"
            )

    def seconds_per_byte(self, received: int) -> float:
        """Return seconds per byte of the parameters, in a round that receives from `received` neighbours."""
        return self.own_seconds_per_byte + received * self.heard_seconds_per_byte if received else 0.0

    def seconds(self, parameter_bytes: float, received: int) -> float:
        """Return the seconds of a round that receives from `received` neighbours."""
        fixed = self.round_seconds + received * self.message_seconds if received else 0.0
        return fixed + parameter_bytes * self.seconds_per_byte(received)

    def times(self, factor: float) -> "RoundWork":
        """Return this work with all seconds multiplied by a factor."""
        own, received = factor * self.own_seconds_per_byte, factor * self.heard_seconds_per_byte
        return RoundWork(self.codec, own, received, factor * self.round_seconds, factor * self.message_seconds)


@dataclass(frozen=True)
class Model:
    """Profiled model on one device: its blocks from the inputs to the loss.

    Args:
        name: name of the profiled model for people: the overrides on the command line.
        batch: samples of a step.
        state_bytes: bytes of the optimizer's state.
        words: overrides on the command line of `recipes/train.py` that make this model; empty for another model.
        rounds: measured device work of gossip rounds, one for each codec.
        optimizer: the profiled optimizer, as `optimizer=` names it; empty where unknown.
        states: the optimizer's states with their parameters' shapes: (name, bytes).
        stepping_bytes: bytes that the optimizer needs only while it steps, when activations are freed.
        whole_bytes: bytes of the parameters whose update needs whole matrices, so that their shards are gathered.
        products_per_second: floating-point operations of Newton-Schulz on the hidden matrices; 0 where unmeasured.
        loop_seconds: seconds of a step outside of the blocks: Lightning's loop and the next batch.
    """

    name: str
    device: str
    blocks: tuple[BlockCost, ...]
    batch: int = 1
    state_bytes: int = 0
    words: tuple[str, ...] = ()
    rounds: tuple[RoundWork, ...] = ()
    optimizer: str = ""
    states: tuple[tuple[str, int], ...] = ()
    stepping_bytes: int = 0
    whole_bytes: int = 0
    products_per_second: float = 0.0
    loop_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a step without any communication."""
        return sum(b.forward_seconds + b.backward_seconds + b.update_seconds for b in self.step_blocks)

    @property
    def step_blocks(self) -> tuple[BlockCost, ...]:
        """The blocks, with the loop's seconds added to the first block's forward."""
        return tuple(
            replace(block, forward_seconds=block.forward_seconds + self.loop_seconds) if place == 0 else block
            for place, block in enumerate(self.blocks)
        )

    @property
    def parameter_bytes(self) -> int:
        return sum(b.parameter_bytes for b in self.blocks)

    @property
    def hidden(self) -> tuple[Sides, ...]:
        return tuple(sides for block in self.blocks for sides in block.hidden)

    def bytes_of_state(self, name: str) -> int:
        """Return the bytes of one state of the optimizer, over all parameters.

        Raises:
            ValueError: the profile has no such state.
        """
        try:
            return dict(self.states)[name]
        except KeyError:
            known = ", ".join(state for state, _ in self.states) or "none"
            raise ValueError(
                f"the profile knows no state {name!r} of the optimizer, only {known}: profile with an optimizer that "
                "keeps it"
            ) from None


@dataclass(frozen=True)
class LinkCost:
    """seconds(bytes) = latency_seconds + bytes / bytes_per_second.

    Args:
        operation: `all_reduce`, `exchange` (every worker sends messages and receives as many), `all_gather`,
            `reduce_scatter` (for these two, bytes are the sum of all parts), `broadcast`.
        reach: `inside` one node or `between` nodes.
        workers: number of workers of one group.
        flows: number of groups that run at the same time and share a network card.
        error: largest relative distance of a measured point from the line.
        points: measured points, (bytes, seconds).
        per_node: number of workers of one group that share a node.
        peers: neighbours to whom each worker sends in an `exchange`, and as many that send to it; the bytes are those
            of all its messages together.

    Raises:
        ValueError: fewer than one neighbour.
    """

    operation: str
    reach: str
    workers: int
    flows: int
    latency_seconds: float
    bytes_per_second: float
    error: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    per_node: int = 1
    peers: int = 1

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise ValueError(f"an exchange has at least one neighbour, got {self.peers}")

    def seconds(self, message_bytes: float) -> float:
        """Seconds of one operation on a message of so many bytes."""
        return self.latency_seconds + message_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Profile:
    """Profile of model and network: all that a forecast needs."""

    model: Model
    network: tuple[LinkCost, ...] = ()
    # Seconds of computation of single steps over their mean: the distribution of stragglers. Empty: all equally long.
    variation: tuple[float, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)  # names of hosts and devices, for people


def write(profile: Profile, path: str | Path) -> None:
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(profile)}, indent=1)
    Path(path).write_text(text + "\n")


def read(path: str | Path) -> Profile:
    """Read a profile that `write` wrote. ValueError: the file doesn't exist, is no profile, has another version, or is
    damaged."""
    text = text_of(path, "make one with `lightning-decentral profile`")
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(
            f"{path} is no JSON: it is damaged or not a profile; make one with `lightning-decentral profile`"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is not a profile of this package: make one with `lightning-decentral profile`")
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {found.get('version')}, this package reads version {VERSION}: profile again"
        )
    try:
        return _profile(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}): profile again") from None


def _profile(found: Mapping[str, Any]) -> Profile:
    model = dict(found["model"])
    blocks = []
    for block in model.pop("blocks"):
        # A KeyError for values that are always measured, although they have defaults.
        always = {key: block[key] for key in ALWAYS_MEASURED}
        hidden = tuple((int(short), int(long)) for short, long in block.get("hidden", ()))
        blocks.append(BlockCost(**{**block, **always, "hidden": hidden}))
    if not blocks:
        raise ValueError("a model without blocks")
    words = tuple(map(str, model.pop("words", ())))
    rounds = tuple(RoundWork(**work) for work in model.pop("rounds", ()))
    states = tuple((str(name), int(size)) for name, size in model.pop("states", ()))
    network = []
    for cost in found["network"]:
        points = tuple((float(size), float(seconds)) for size, seconds in cost.get("points", ()))
        network.append(LinkCost(**{**cost, "points": points}))
    variation = tuple(float(factor) for factor in found["variation"])
    known = Model(blocks=tuple(blocks), words=words, rounds=rounds, states=states, **model)
    return Profile(known, tuple(network), variation, dict(found["hosts"]))
