"""KV cache between slices, cut out of the graph: keys and values forward, their accumulated gradients backward.

    forward:   rows[start:stop] = new;   returns rows[:stop]
    backward:  total = grad + carried;   returns total[start:stop];   carried = total[:start]

A slice's graph ends at its own keys and values and is freed in its backward; the sum is the uncut model's gradient."""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch's optimizers do; torch.compiler.disable imports much


class LayerRows:
    """Keys, or values, of one layer for one micro-batch, for `length` tokens in all: [..., length, head]."""

    def __init__(self, length: int) -> None:
        self.rows: Tensor | None = None
        self._length = length
        self._filled = 0
        self._returned = length
        self._carried: Tensor | None = None

    def extend(self, new: Tensor, start: int, stop: int) -> Tensor:  # (.., stop - start, head)
        """Store `new` at start..stop and return rows[:stop], differentiable with respect to `new`."""
        if start == 0 and stop == self._length:
            return new  # a single slice: no later slice reads what would be stored
        prefix: Tensor = _Extend.apply(new, self, start, stop)  # type: ignore[no-untyped-call]
        return prefix

    def write(self, new: Tensor, start: int, stop: int) -> Tensor:  # (.., stop - start, head)
        """Store `new` at start..stop and return rows[:stop], without a gradient."""
        assert start <= self._filled, f"slice {start}..{stop} came before its context, known are {self._filled} tokens"
        if self.rows is None:
            self.rows = new.new_empty((*new.shape[:-2], self._length, new.shape[-1]))
        # `data` doesn't count as a change of the prefixes that earlier slices keep for their backward: these rows come
        # after them.
        rows = self.rows.data
        rows[..., start:stop, :] = new  # by position: a recomputation writes the same again
        self._filled = max(self._filled, stop)
        return rows[..., :stop, :]

    def give_back(self, grad: Tensor, start: int, stop: int) -> Tensor:  # (.., stop, head)
        """Return the whole gradient of rows start..stop, given the gradient of the prefix :stop. RuntimeError: a later
        slice's backward hasn't run yet; the gradient would be silently wrong."""
        if stop != self._returned:
            raise RuntimeError(f"slice {start}..{stop} runs backward before slice ..{self._returned}: last slice first")
        total = grad if self._carried is None else grad + self._carried
        self._returned = start
        self._carried = total[..., :start, :]  # later slices' gradient of these keys, until their own slice's backward
        if start == 0:  # after the last backward pass no rows are needed
            self.rows = self._carried = None
        return total[..., start:, :]


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, store: LayerRows, start: int, stop: int) -> Tensor:
        ctx.store, ctx.start, ctx.stop = store, start, stop
        return store.write(new, start, stop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.store.give_back(grad, ctx.start, ctx.stop), None, None, None


class KVCache:
    """Keys and values of all layers for one micro-batch, with the interface of a `transformers` cache. A model is
    called once per slice, after `at(start, stop)`. `stores`: (keys, values) by layer, for layers that have stored
    any."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.stores: dict[int, tuple[LayerRows, LayerRows]] = {}
        self._start, self._stop = 0, length

    def at(self, start: int, stop: int) -> "KVCache":
        """Return a cache with the same rows for the slice start..stop."""
        # A new object for each slice: a later recomputation still knows its position.
        view = KVCache(self.length)
        view.stores, view._start, view._stop = self.stores, start, stop
        return view

    @_disable_dynamo  # a compiled block would take the rows for a constant
    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values, and return those up to the slice's end: [batch, heads, tokens, head]."""
        stores = self.stores.setdefault(layer_idx, (LayerRows(self.length), LayerRows(self.length)))
        return stores[0].extend(keys, self._start, self._stop), stores[1].extend(values, self._start, self._stop)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    get_query_offset = get_seq_length  # the position of the slice's first token

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys that the slice sees, position of the first)."""
        return self._start + query_length, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"only keys and values are kept between slices, this cache has no {name}")
