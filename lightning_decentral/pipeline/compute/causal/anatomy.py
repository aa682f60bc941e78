"""Anatomy of a causal language model: the places of its parts, found by watching one forward of a small copy.

    [before] -> block_0 -> .. -> block_(n-1) -> [after] -> head -> [operations on logits, the loss]

The blocks are in one list and pass on one hidden state. Modules with parameters that are called before the first block
belong to the first stage; those called after the last block to the last stage."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.small_copy import EXPERTS, Unfit
from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import StagePlace


@dataclass(frozen=True)
class Router:
    """Router of experts in a block, whose logits the model's own loss uses (`output_router_logits`)."""

    kind: str  # name of its class: blocks without experts may have another module at its path
    index: int | None  # position of the logits in its result; None: the result is the logits
    width: str  # the configuration's name for the number of experts


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of a causal language model."""

    blocks: str  # path of their list
    head: str  # path of the map to logits
    before: tuple[str, ...]  # paths of modules with parameters that are called before the first block
    after: tuple[str, ...]  # paths of those called after the last block, including the head
    returned: int | None  # what a block returns besides the hidden state; None: it returns the hidden state alone
    routers: Mapping[str, Router]  # by their path within a block
    output: type  # class of the result of the module that has the blocks
    remembering: bool  # whether every block keeps keys and values

    @property
    def inner(self) -> str:
        """Path of the module that has the list of blocks."""
        return self.blocks.rpartition(".")[0]


def dissect(module: Any, run: Callable[[KVCache], Any], length: int) -> Anatomy:
    """Find the parts of a model: `run` runs one forward of `length` tokens and returns its output. Unfit: the model
    doesn't consist of blocks in one list."""
    blocks, to_logits = _blocks(module), module.get_output_embeddings()
    head = next((name for name, part in module.named_modules() if part is to_logits), None)
    if head is None:
        raise Unfit("has no map from hidden states to logits of its own (get_output_embeddings)")
    names = blocks.split(".")
    way = [".".join(names[:i]) for i in range(len(names) + 1)]  # from the model down to its blocks
    siblings = [
        ".".join(filter(None, (up, name))) for up in way[:-1] for name, _ in module.get_submodule(up).named_children()
    ]
    parts = [p for p in siblings if p not in way and any(True for _ in module.get_submodule(p).parameters())]
    layers = [f"{blocks}.{i}" for i in range(len(module.get_submodule(blocks)))]
    around = [*parts, *layers, blocks.rpartition(".")[0]]
    within = [f"{path}.{name}" for path in layers for name, _ in module.get_submodule(path).named_modules() if name]
    with watched(module, around) as (met, results), watched(module, within) as (_, inside):
        output = run(memory := KVCache(length))
    order = [path for path in met if path in layers]
    if order != layers:
        raise Unfit(f"doesn't call the blocks of {blocks} once each and in order")
    first, last = met.index(layers[0]), len(met) - 1 - met[::-1].index(layers[-1])
    before = tuple(path for path in parts if path in met[:first] or path not in met)
    after = tuple(path for path in parts if path in met[last:])
    if head not in after:
        raise Unfit(f"doesn't call {head} after its blocks as a part of its own")
    between = [path for path in parts if path in met[first:last] and path not in layers]
    if between:
        raise Unfit(f"calls {between[0]} between its blocks")
    block, model = results[layers[0]], results[around[-1]]
    returned = len(block) - 1 if isinstance(block, tuple) else None
    routers = _routers(module, layers, inside, output)
    return Anatomy(blocks, head, before, after, returned, routers, type(model), len(memory.stores) == len(layers))


def _blocks(module: Any) -> str:
    """Path of the outermost list with as many modules as the configuration has layers."""
    depth = module.config.num_hidden_layers
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) == depth]
    outer: list[str] = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise Unfit(f"has {len(outer)} lists of {depth} blocks instead of one" + (f": {outer}" if outer else ""))
    if "." not in outer[0]:
        raise Unfit("has its blocks next to its head, not in a model of their own")
    return outer[0]


@contextmanager
def watched(module: nn.Module, paths: list[str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the paths in the order of their calls, and what each module returned last."""
    met: list[str] = []
    results: dict[str, Any] = {}

    def note(path: str, _module: nn.Module, _args: Any, result: Any) -> None:
        met.append(path)
        results[path] = result

    with ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(module.get_submodule(path).register_forward_hook(partial(note, path)))
        yield met, results


def _routers(module: Any, layers: list[str], results: Mapping[str, Any], output: Any) -> dict[str, Router]:
    """Find the routers whose results the model passes to its loss, by identity of the results."""
    wanted = {id(logits) for logits in output.get("router_logits") or ()}
    names = {size: name for name, size in vars(module.config).items() if re.fullmatch(EXPERTS, name)}
    found: dict[int, tuple[str, Router]] = {}
    for path, result in results.items():
        for index, item in enumerate(result) if isinstance(result, tuple) else [(None, result)]:
            if id(item) in wanted and isinstance(item, Tensor) and item.shape[-1] in names:
                layer = next(layer for layer in layers if path.startswith(f"{layer}."))
                router = Router(type(module.get_submodule(path)).__name__, index, names[item.shape[-1]])
                found[id(item)] = path.removeprefix(f"{layer}."), router  # outer modules return after inner ones
    return dict(found.values())


@contextmanager
def routing_seen(
    routers: Sequence[Sequence[tuple[nn.Module, Router]]], place: StagePlace, name: str
) -> Iterator[dict[int, Tensor]]:
    """Yield the logits that this stage's routers compute in this context, by their number. `routers`: for each block.
    `name`: of the model's class."""
    seen: dict[int, Tensor] = {}
    numbered = list(enumerate((i, *found) for i, row in enumerate(routers) for found in row))
    own = [row for row in numbered if place.first_block <= row[1][0] < place.stop_block]
    with ExitStack() as hooks:
        for n, (_, part, router) in own:
            hooks.enter_context(
                part.register_forward_hook(
                    lambda _, __, result, n=n, at=router.index: seen.update({n: result if at is None else result[at]})
                )
            )
        yield seen
    if len(seen) != len(own):
        raise ValueError(
            f"{len(own) - len(seen)} routers of {name} gave no logits for its loss: leave "
            "the blocks uncompiled, or output_router_logits out"
        )
