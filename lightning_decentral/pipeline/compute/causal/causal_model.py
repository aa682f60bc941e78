"""Adapter of transformers' causal language models: cuts an unmodified model into stages by its anatomy.

Every stage runs the model's own forward, with stand-ins for other stages' parts. Other stages' blocks are hollow: the
hollow block before the stage's blocks passes the hidden state in, the one after them takes it out. What the model does
to logits, and its loss, run unchanged when all slices are there."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.anatomy import Anatomy, Router, routing_seen
from lightning_decentral.pipeline.compute.causal.masks import Slice, current, documents_of, install
from lightning_decentral.pipeline.compute.causal.refusals import (
    OF_THE_ANSWER,
    original,
    refuse_foreign,
    refuse_unsliceable,
)
from lightning_decentral.pipeline.compute.causal.small_copy import reach
from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, Pipelined, Shape, StagePlace, hides_nothing
from lightning_decentral.pipeline.plan.partition import weighed
from lightning_decentral.shared.compute.block_cost import parameter_bytes
from lightning_decentral.shared.plan.profile import BlockCost

RIGHT, LEFT = "padding on the right", "padding on the left"
PACKING, ROUTING = "packed sequences", "output_router_logits"


class CausalModel(Pipelined):
    """A causal language model of `transformers`. `refused`: kinds of calls that can't be sliced for it, and why.
    `aligned`: use causal biases instead of masks."""

    sliceable = True

    def __init__(
        self, module: nn.Module, anatomy: Anatomy, refused: Mapping[str, str] | None = None, aligned: bool = False
    ) -> None:
        super().__init__(module)
        self.aligned = aligned
        self._anatomy, self._refused = anatomy, refused or {}
        self._config: Any = vars(module)["config"]
        self._entering: Tensor | None = None
        self._reach = reach(self._config)
        refuse_unsliceable(module)
        install()
        known = anatomy.routers
        inside = [dict(original(block).named_modules()) for block in self.blocks]
        self._routers: list[list[tuple[nn.Module, Router]]] = [  # of each block that the anatomy knows, in order
            [(parts[n], router) for n, router in known.items() if n in parts and type(parts[n]).__name__ == router.kind]
            for parts in inside
        ]
        # Hidden states are sent in this dtype. Found here and by `keep`: a look in each step would read all parameters,
        # of which a stage has a part.
        self._like = next(p for p in module.parameters() if p.is_floating_point())

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.module.get_submodule(self._anatomy.blocks).children())

    def loads(self) -> tuple[list[BlockCost], BlockCost, BlockCost]:
        paths = self._anatomy.before, self._anatomy.after
        before, after = (sum(parameter_bytes(self.module.get_submodule(p).parameters()) for p in ps) for ps in paths)
        sizes = [parameter_bytes(block.parameters()) for block in self.blocks]
        # Looking up an embedding costs no time worth counting.
        return [weighed(size) for size in sizes], BlockCost(parameter_bytes=before), weighed(after)

    def keep(self, place: StagePlace) -> None:
        a, blocks = self._anatomy, self.blocks
        gone = [i for i in range(len(blocks)) if not place.first_block <= i < place.stop_block]
        # The last hollow block before the stage's blocks passes the hidden state in, the first one after takes it out.
        before = {i: self._enter if i == place.first_block - 1 else self._returned for i in range(place.first_block)}
        hollow = {str(i): Hollow(blocks[i], before.get(i, take_out)) for i in gone}
        self._replace(self.module.get_submodule(a.blocks), hollow)
        dtype = next(self.module.parameters()).dtype
        others = () if place.first else [path for path in a.before if not (place.last and path in a.after)]
        behind = () if place.last else [path for path in a.after if not (place.first and path in a.before)]
        for path in (*others, *behind):
            up, _, name = path.rpartition(".")
            silent = Silent(dtype) if isinstance(self.module.get_submodule(path), nn.Embedding) else nn.Identity()
            self._replace(self.module.get_submodule(up), {name: silent})
        self._like = next(p for p in self.module.parameters() if p.is_floating_point())

    def _enter(self, _: Tensor) -> Any:
        assert self._entering is not None
        return self._returned(self._entering)

    def _returned(self, hidden: Tensor) -> Any:  # (batch, tokens, width)
        """Wrap a hidden state as a block returns it: alone, or in a tuple with None for the block's other outputs."""
        others = self._anatomy.returned
        return hidden if others is None else (hidden, *[None] * others)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        given = {k: v for k, v in {**bound, **bound.get("kwargs", {})}.items() if k not in ("self", "kwargs")}
        refuse_foreign(type(self.module).__name__, given)
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        # With keys and values kept, transformers doesn't separate documents either.
        caching = self._config.use_cache if given.get("use_cache") is None else given["use_cache"]
        documents = documents_of(positions) if positions is not None and mask is None and not caching else None
        if mask is not None and hides_nothing(mask):
            mask = None
        extra = {name: given[name] for name in OF_THE_ANSWER if given.get(name) is not None}
        call = Call(given["input_ids"], mask, positions, extra, documents)
        self._refuse_untrue(call)
        return call

    def _refuse_untrue(self, call: Call) -> None:
        """Raise ValueError for a kind of call that gives other results in slices than as a whole."""
        mask = call.attention_mask
        asked = {
            RIGHT: lambda: mask is not None and not bool(mask.all()),
            LEFT: lambda: mask is not None and not bool(mask[:, 0].all()),
            PACKING: lambda: call.documents is not None and bool(call.documents.any()),
            ROUTING: lambda: self._routing(call),
        }
        for kind, why in self._refused.items():
            if asked[kind]():
                raise ValueError(f"{type(self.module).__name__} can't be cut into slices with {kind}: {why}")
        if self._reach is not None:
            last = call.inputs.shape[1] if call.position_ids is None else int(call.position_ids.max()) + 1
            if last > self._reach:
                raise ValueError(
                    f"{type(self.module).__name__} changes its rotary positions with the length beyond {self._reach} "
                    f"tokens, unknown to slices; this one has {last}: use shorter sequences, or another rope_type"
                )

    def _routing(self, call: Call) -> bool:
        """True where the model's loss asks for the routers' logits (`output_router_logits`)."""
        return bool(call.extra.get("output_router_logits", vars(self._config).get("output_router_logits", False)))

    def length(self, call: Call) -> int:
        return call.inputs.shape[1]

    def forward(
        self, place: StagePlace, call: Call, hidden: Tensor | None, memory: KVCache, start: int, stop: int
    ) -> Tensor:
        """Return hidden states or, on the last stage, logits: [batch, tokens, width]; routers' logits follow."""
        widths, routed = self._widths(call), list[Tensor]()
        if hidden is not None:
            hidden, *routed = hidden.split([self._config.hidden_size, *widths], dim=-1)
        elif widths:  # zeros for routers' logits that are still to come
            rows, where = (call.inputs.shape[0], stop - start), call.inputs.device
            routed = [torch.zeros(*rows, width, dtype=self._like.dtype, device=where) for width in widths]
        self._entering = hidden  # the last hollow block before this stage's blocks returns it
        begin = {"input_ids": call.inputs[:, start:stop]} if hidden is None else {"inputs_embeds": hidden.detach()}
        mask, positions, documents = call.attention_mask, call.position_ids, call.documents
        given = {
            "attention_mask": None if mask is None else mask[:, :stop],  # positions of the keys: the context's, too
            "position_ids": None if positions is None else positions[:, start:stop],
            "past_key_values": memory.at(start, stop),
            "use_cache": True,
        }
        documents = None if documents is None else documents[:, :stop]
        name = type(self.module).__name__
        seeing = routing_seen(self._routers, place, name) if widths else nullcontext(dict[int, Tensor]())
        token = current.set(Slice(documents, self.aligned))  # for masks that are built within
        try:
            with seeing as seen:
                output = self._run(place, {**begin, **given})
        finally:
            current.reset(token)
        missing = set(range(place.first_block, place.stop_block)) - memory.stores.keys()
        if self._anatomy.remembering and missing:
            raise ValueError(  # the block was changed after the model was built
                f"block {min(missing)} of {name} gave no keys and values to past_key_values, as "
                "its class does: later slices would not see earlier ones; use its own attention, or slicing=Uniform(1)"
            )
        if not routed:
            return output
        own = {at: logits.view(*output.shape[:2], -1).to(output.dtype) for at, logits in seen.items()}
        return torch.cat([output, *(own.get(i, before) for i, before in enumerate(routed))], dim=-1)

    def _run(self, place: StagePlace, given: Mapping[str, Any]) -> Tensor:
        """Run the model's own forward up to this stage's end."""
        head, forward = self.module.get_submodule(self._anatomy.head), type(self.module).forward
        end = head.register_forward_hook(lambda _, __, result: take_out(result)) if place.last else nullcontext()
        try:
            with end:
                forward(self.module, **given)
        except Out as out:
            return out.result
        raise AssertionError(f"{type(self.module).__name__} didn't reach its stage's end")

    def shape(self, call: Call, start: int, stop: int) -> Shape | None:
        """Shape and dtype of the hidden state, followed by routers' logits if the loss uses them."""
        width = self._config.hidden_size + sum(self._widths(call))
        return (call.inputs.shape[0], stop - start, width), self._like.dtype

    def answer(self, call: Call, output: Tensor) -> Any:  # (batch, length, vocabulary [+ widths of routers])
        """Return the model's own output for these logits: scaled, capped, with a loss if labels were given."""
        widths = self._widths(call)
        logits, *routed = output.split([output.shape[-1] - sum(widths), *widths], dim=-1)
        hidden = output.new_zeros(1, 1, 1).expand(*output.shape[:2], self._config.hidden_size)  # never read
        routers = {"router_logits": tuple(rows.flatten(0, 1) for rows in routed)} if routed else {}
        inner = self._anatomy.output(last_hidden_state=hidden, **routers)
        with self._answered(self._anatomy.inner, inner), self._answered(self._anatomy.head, logits):
            return type(self.module).forward(
                self.module, input_ids=call.inputs, attention_mask=call.attention_mask, use_cache=False, **call.extra
            )

    @contextmanager
    def _answered(self, path: str, result: Any) -> Iterator[None]:
        """Let the submodule at this path return `result` in this context."""
        up, _, name = path.rpartition(".")
        modules = self.module.get_submodule(up)._modules
        before, modules[name] = modules[name], FixedOutput(result)
        try:
            yield
        finally:
            modules[name] = before

    def _widths(self, call: Call) -> list[int]:
        """Widths of all routers' logits, in order; [] if the loss doesn't use them."""
        known = vars(self._config)
        return [known[router.width] for found in self._routers for _, router in found] if self._routing(call) else []


class Out(BaseException):
    """Exception that ends a forward at the stage's end, with its result."""

    def __init__(self, result: Tensor) -> None:
        self.result = result


class Hollow(nn.Module):
    """Stand-in for a block of another stage; keeps its plain attributes, by which models choose masks. `pass_on`: maps
    the hidden state to the block's result."""

    def __init__(self, block: nn.Module, pass_on: Callable[[Tensor], Any]) -> None:
        super().__init__()
        own = vars(original(block)).items()
        vars(self).update({name: v for name, v in own if isinstance(v, (str, int, float)) and name[0] != "_"})
        self._pass_on = pass_on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass_on(args[0] if args else kwargs["hidden_states"])


class Silent(nn.Module):
    """Stand-in that adds 0 for an embedding that another stage has already added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.zeros((), dtype=self._dtype, device=given.device)


class FixedOutput(nn.Module):
    """Stand-in for a module that returns a known result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._result


def take_out(hidden: Tensor) -> Any:  # (batch, tokens, width)
    raise Out(hidden)
