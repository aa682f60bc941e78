"""Chains of repeated blocks in an nn.Module, found by looking at it, and evaluation mode for a while."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Chain:
    """Names of blocks in order of registration, all of one class."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.names)} x {self.kind} ({self.names[0]} ... {self.names[-1]})"


def candidates(module: nn.Module) -> list[Chain]:
    """Chains of two or more blocks with parameters, the likeliest first.

    A block is a member of a Sequential or ModuleList, containers flattened: the layers of all stages are one chain.
    Likely is a chain that holds half of the largest one's parameters, and of these the longest. Whether a chain may be
    cut is for `verify` to say.
    """
    modules = dict(module.named_modules())
    members: dict[type, list[str]] = defaultdict(list)
    for name, block in modules.items():
        if isinstance(modules.get(name.rpartition(".")[0]), CONTAINERS) and any(True for _ in block.parameters()):
            members[type(block)].append(name)
    outermost = {kind: [n for n in names if not _within(n, names)] for kind, names in members.items()}
    found = [Chain(kind.__name__, tuple(names)) for kind, names in outermost.items() if len(names) > 1]
    sizes = {chain: sum(p.numel() for name in chain.names for p in modules[name].parameters()) for chain in found}
    enough = max(sizes.values(), default=0) / 2
    # Half of the parameters: blocks before the branches inside of them; the longest: layers before stages.
    return sorted(found, key=lambda chain: (sizes[chain] < enough, -len(chain.names), -sizes[chain]))


def _within(name: str, others: list[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each of its parts in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
