"""KV cache between slices, cut out of the graph: keys and values forward, their accumulated gradients backward.

    forward:   rows[start:stop] = new;   returns rows[:stop]
    backward:  total = grad + carried;   returns total[start:stop];   carried = total[:start]

A slice's graph ends at its own keys and values and is freed at its backward; the sum is the uncut model's gradient.
"""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch's optimizers; torch.compiler.disable imports much


class LayerRows:
    """The keys, or the values, of one layer for one micro-batch: [..., length, head].

    Args:
        length: tokens of the whole sequence.
    """

    def __init__(self, length: int) -> None:
        self.rows: Tensor | None = None
        self._length = length
        self._filled = 0
        self._returned = length
        self._carried: Tensor | None = None

    def extend(self, new: Tensor, start: int, stop: int) -> Tensor:  # (.., stop - start, head)
        """rows[:stop] once `new` stands at start..stop, differentiable towards `new`."""
        if start == 0 and stop == self._length:
            return new  # a single slice: nobody comes later to read what would be stored
        prefix: Tensor = _Extend.apply(new, self, start, stop)  # type: ignore[no-untyped-call]
        return prefix

    def write(self, new: Tensor, start: int, stop: int) -> Tensor:  # (.., stop - start, head)
        """The same without a gradient."""
        assert start <= self._filled, f"slice {start}..{stop} came before its context, known are {self._filled} tokens"
        if self.rows is None:
            self.rows = new.new_empty((*new.shape[:-2], self._length, new.shape[-1]))
        # `data` doesn't count as a change of the prefixes that earlier slices keep for their backward: these rows are
        # behind them.
        rows = self.rows.data
        rows[..., start:stop, :] = new  # by position: a recomputation writes the same again
        self._filled = max(self._filled, stop)
        return rows[..., :stop, :]

    def give_back(self, grad: Tensor, start: int, stop: int) -> Tensor:  # (.., stop, head)
        """The whole gradient of the rows start..stop, given the one that came through the prefix :stop.

        Raises:
            RuntimeError: a later slice hasn't come back; the gradient would be wrong without a sign.
        """
        if stop != self._returned:
            raise RuntimeError(f"slice {start}..{stop} came back before slice ..{self._returned}: last slice first")
        total = grad if self._carried is None else grad + self._carried
        self._returned = start
        self._carried = total[..., :start, :]  # what later slices ask of these keys, until their own slice comes back
        if start == 0:  # the last one to come back: nothing is needed any more
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
    """All layers' keys and values of one micro-batch; what `transformers` calls a cache, as far as its models ask.

    A model is called once per slice, after `at(start, stop)`.

    Attributes:
        stores: (keys, values) by layer, of those that have stored any.
    """

    is_compileable = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.stores: dict[int, tuple[LayerRows, LayerRows]] = {}
        self._start, self._stop = 0, length

    def at(self, start: int, stop: int) -> "KVCache":
        """The same rows for the slice start..stop."""
        # Another object for each slice: what is recomputed later still knows its place.
        view = KVCache(self.length)
        view.stores, view._start, view._stop = self.stores, start, stop
        return view

    @_disable_dynamo  # a compiled block would take the rows for a constant
    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the slice's end, [batch, heads, tokens, head]."""
        stores = self.stores.setdefault(layer_idx, (LayerRows(self.length), LayerRows(self.length)))
        return stores[0].extend(keys, self._start, self._stop), stores[1].extend(values, self._start, self._stop)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    get_query_offset = get_seq_length  # the position of the slice's first token

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys that the slice sees, position of the first)."""
        return self._start + query_length, 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"keys and values are all that is kept between slices, there is no {name}")
