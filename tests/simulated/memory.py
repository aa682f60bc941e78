"""Memory of the simulated device: whose it is until when, and that of the host which the device reads by itself."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.simulated.streams import CUDA, Engine, Mark, Stream, the


class Block:
    """Memory, and to who asks a tensor for it its storage. It goes back where the last tensor on it dies or where it is
    emptied, and is poisoned as soon as the stream that took it gets there.

    Attributes:
        storage: the host's, where the values lie; another one where it was emptied and filled again.
        readers: streams beside the own one that still read it.
    """

    device = CUDA

    def __init__(self, inner: Tensor, engine: Engine) -> None:
        self._dtype, self._engine = inner.dtype, engine
        self._take(inner.untyped_storage())

    def _take(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.readers = storage, set[Stream]()
        self._engine.takes(storage.nbytes())
        stream = self._engine.current
        stream.takes()
        last = storage, self._dtype, stream, self.readers
        self._end = weakref.finalize(self, _give_back, *last)

    def resize_(self, count: int) -> None:
        """To nothing or from nothing: the memory goes back, or is another one, the current stream's."""
        if count != self.nbytes():
            assert not count or not self.nbytes(), "a part of a storage isn't given back"
            self._end()
            fresh = torch.UntypedStorage(count)
            with _disable_current_modes():
                poison(_on(fresh, self._dtype), self._engine)
            self._take(fresh)

    def nbytes(self) -> int:
        return self.storage.nbytes()

    size = nbytes

    def data_ptr(self) -> int:
        return self.storage.data_ptr()

    @property
    def _cdata(self) -> int:
        return id(self)


def _on(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[call-overload,no-any-return]


def _give_back(storage: torch.UntypedStorage, dtype: torch.dtype, stream: Stream, readers: set[Stream]) -> None:
    marks = []
    stream.engine.takes(-storage.nbytes())
    for reader in readers - {stream}:
        reader.then((mark := Mark()).pass_)
        marks.append(mark)

    def reuse() -> None:
        stream.reuses(lambda: poison(_on(storage, dtype), stream.engine))

    if marks:  # as the allocator does: nobody waits, the memory is used again when it has seen that all have passed
        stream.engine.kept.append((marks, reuse))
    else:
        reuse()


def poison(tensor: Tensor, engine: Engine) -> Tensor:
    """Values that no test expects."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(engine.random.random() < 0.5)
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 99)


# ---- of the host ------------------------------------------------------------------------------------------------


def poisoned_like(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Pinned, not filled."""
    with _disable_current_modes():
        return pin(poison(torch.empty_like(like, dtype=dtype, device="cpu", requires_grad=False), the()))


def pin(tensor: Tensor) -> Tensor:
    the().pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in the().pinned


def pinned(tensor: Tensor) -> Tensor:
    return tensor if is_pinned(tensor) else pin(tensor.clone())
