"""What stands behind `shared/compute/cuda.py` while a device is simulated, and how torch makes tensors of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_map_only

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.codec import blocks
from tests.simulated.memory import pin, pinned, poison
from tests.simulated.streams import Engine, Event, Stream, at, current, here, on, the
from tests.simulated.tensors import Simulated, become, host_like, move, target

FACTORIES = [
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand"),
    *("randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
]
# No mode of torch's: those are off in the hooks of a backward.


def _factory(func: Any) -> Any:
    """`device="cuda"` makes a tensor of the simulated device, `device="cpu"` beside one of them the host's."""

    def make(*args: Any, **kwargs: Any) -> Any:
        device, engine = kwargs.get("device"), here()
        if device is None or engine is None:
            return func(*args, **kwargs)
        if active_fake_mode():  # torch asks for shapes
            return func(*args, **{**kwargs, "device": "cpu"})
        if (where := torch.device(kwargs.pop("device"))).type != "cuda":
            return func(*tree_map_only(Simulated, lambda t: t.inner, args), **kwargs, device=where)
        if func.__name__ in ("tensor", "as_tensor"):
            engine.host_waits("copy to the device")
        made = func(*args, **kwargs)
        if isinstance(made, Simulated):
            return made
        if func.__name__.startswith("empty"):
            poison(made.detach(), engine)
        return Simulated(made.detach()).requires_grad_(made.requires_grad)

    return make


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` of a tensor of the host."""
    if here() is not None and not isinstance(tensor, Simulated):
        where, dtype, late = target(tensor, *args, **kwargs)
        if where.type == "cuda":  # a shard's may lie there already
            return move(tensor, dtype) if tensor.is_cuda else _moved(tensor, dtype, late)
    return move(tensor, *args, **kwargs)


def _data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` of a tensor of the host."""
    (become if isinstance(value, Simulated) else torch._C.TensorBase.data.__set__)(tensor, value)


def _fork_rng(devices: Any = None, enabled: bool = True, **_: Any) -> Any:
    """The device draws from the host's generator."""
    return fork_rng(devices=[], enabled=enabled)


fork_rng = torch.random.fork_rng


def _load(module: nn.Module, *args: Any) -> None:
    """Copies, as on a device: a parameter that is swapped loses its hooks."""
    was = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        load(module, *args)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


load = nn.Module._load_from_state_dict


def _moved(tensor: Tensor, dtype: torch.dtype, late: bool) -> Tensor:
    out = Simulated(poison(torch.empty_like(tensor, dtype=dtype).detach(), the()))
    return out.copy_(tensor, non_blocking=late)


DOOR: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda *_: current(),
    "on": on,
    "device_count": lambda: 1,
    "synchronize": lambda *_: the().host_waits("synchronize"),
    "host_like": host_like,
    "host_bytes": lambda count, _: pin(torch.empty(count, dtype=torch.uint8)),
    "pinned": pinned,
    "free_bytes": lambda _: 2**30,
    "total_bytes": lambda _: 2**30,
    "present_bytes": lambda _: the().present_bytes,
    "peak_bytes": lambda _: the().peak_bytes,
    "forget_peak": lambda _: the().forget_peak(),
    "give_back": lambda: None,
    "random_state": lambda *_: torch.get_rng_state(),
    "set_random_state": lambda state, *_: torch.set_rng_state(state),
}


def _by_engine(cached: Any) -> Any:
    """What is computed once for a device, here once for each that is simulated."""
    return lambda *args: the().once((cached, args), lambda: cached.__wrapped__(*args))


@contextmanager
def door() -> Iterator[None]:
    """Within, `shared/compute/cuda.py` leads to the simulated device, in every thread that is `at` one."""
    was = torch.__future__.get_swap_module_params_on_conversion()
    # To C++ the tensors are the host's, and `module.to` would give the parameters memory that nobody has.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        made = {name: _factory(getattr(torch, name)) for name in FACTORIES}
        with (
            mock.patch.multiple(cuda, **DOOR),
            mock.patch.multiple(torch, **made),
            mock.patch.object(Tensor, "to", _to),
            mock.patch.object(Tensor, "data", property(torch._C.TensorBase.data.__get__, _data), create=True),
            mock.patch.object(torch.random, "fork_rng", _fork_rng),
            mock.patch.object(nn.Module, "_load_from_state_dict", _load),
            mock.patch.object(blocks, "midpoints", _by_engine(blocks.midpoints)),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(was)


@contextmanager
def device(seed: int) -> Iterator[Engine]:
    """Within, this process has a CUDA device."""
    with door(), at(seed) as engine:
        yield engine
