"""Finds chains of repeated blocks in an nn.Module; contexts for evaluation mode and for running uncompiled."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class BlockSequence:
    """Names of blocks in order of registration, all of one class, or plain layers of several."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.names)} x {self.kind} ({self.names[0]} ... {self.names[-1]})"


def candidates(module: nn.Module) -> list[BlockSequence]:
    """Return chains of two or more blocks with parameters, the likeliest first.

    A block is a member of a Sequential or ModuleList, containers flattened: the layers of all stages are one chain.
    Where its blocks lie in several networks (a student and its teacher), those of each are a chain as well; so are
    plain layers of several classes (a VGG). Likely is a chain that holds half of the largest one's parameters, and of
    these the longest. Whether a chain may be cut is for `verify` to decide."""
    modules = dict(module.named_modules())
    members: dict[type, list[str]] = defaultdict(list)
    for name, block in modules.items():
        if isinstance(modules.get(name.rpartition(".")[0]), CONTAINERS) and any(True for _ in block.parameters()):
            members[type(block)].append(name)
    outermost = {kind: [n for n in names if not _within(n, names)] for kind, names in members.items()}
    found = [BlockSequence(kind.__name__, tuple(names)) for kind, names in outermost.items() if len(names) > 1]
    found += [part for chain in found for part in _apart(chain, modules)]
    found += _plain_layers(modules, members)
    sizes = {chain: sum(p.numel() for name in chain.names for p in modules[name].parameters()) for chain in found}
    enough = max(sizes.values(), default=0) / 2
    # Half of the parameters: blocks before the branches inside of them; the longest: layers before stages.
    return sorted(found, key=lambda chain: (sizes[chain] < enough, -len(chain.names), -sizes[chain]))


def _apart(chain: BlockSequence, modules: Mapping[str, nn.Module]) -> list[BlockSequence]:
    """Split a chain whose blocks lie in several networks (student, teacher) by network; empty where all lie in one."""
    rows = [name.split(".") for name in chain.names]
    shared = next(i for i in count() if len({tuple(row[: i + 1]) for row in rows}) > 1)
    if isinstance(modules[".".join(rows[0][:shared])], CONTAINERS):  # stages of one network, one behind the other
        return []
    parts: dict[str, list[str]] = defaultdict(list)
    for name, row in zip(chain.names, rows, strict=True):
        parts[row[shared]].append(name)
    return [BlockSequence(chain.kind, tuple(names)) for names in parts.values() if len(names) > 1]


def _plain_layers(modules: Mapping[str, nn.Module], members: Mapping[type, list[str]]) -> list[BlockSequence]:
    """Return one chain of all layers without submodules, of any class, outside of blocks; none where there is none."""
    blocks = [n for names in members.values() if len(names) > 1 for n in names if _has_parts(modules[n])]
    kinds = {kind: [n for n in names if not _has_parts(modules[n])] for kind, names in members.items()}
    layers = {name: kind for kind, names in kinds.items() for name in names if not _within(name, blocks)}
    if len(set(layers.values())) < 2:
        return []
    return [BlockSequence("layer", tuple(name for name in modules if name in layers))]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None  # the module may define `__len__`, and be false when empty


def _within(name: str, others: list[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules eagerly, so that hooks see what runs inside of them; nothing is compiled."""
    with torch.compiler.set_stance("force_eager") if compiles() else nullcontext():
        yield


def compiles() -> bool:
    """Return whether anything may have been given to torch.compile in this process, modules or functions."""
    return "torch._dynamo" in sys.modules  # torch._dynamo takes seconds to import, and torch.compile imports it


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode within; afterwards restore the mode of each of its parts."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
