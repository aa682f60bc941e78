"""Interface to CUDA: streams, events, pinned memory, memory sizes, generators. The only module that uses `torch.cuda`.

Code that needs more of a device than tensor arithmetic uses this module by its name (`cuda.Stream`), so that tests can
put a simulated device in its place. Everywhere `device.type == "cuda"` decides whether something lies on a CUDA device.
"""

import torch
from torch import Tensor
from torch.cuda import Event as Event
from torch.cuda import Stream as Stream

current_stream, on = torch.cuda.current_stream, torch.cuda.stream
"""The stream that the host queues work to on a device; `with on(stream)` changes it."""

device_count, set_device, device_name = torch.cuda.device_count, torch.cuda.set_device, torch.cuda.get_device_name
synchronize = torch.cuda.synchronize  # `synchronize`: the host waits for all streams of a device.


def host_like(like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return empty host memory of the shape and strides of `like`; pinned, so that `device` (by default that of `like`)
    copies to and from it asynchronously."""
    pin = (device or like.device).type == "cuda"  # pinned memory is slow to allocate, and needs CUDA
    return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=pin, requires_grad=False)


def host_bytes(count: int, device: torch.device) -> Tensor:
    """Return `count` bytes of host memory, uint8, pinned as `host_like`'s."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")


def pinned(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned host memory, from which a device copies asynchronously."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def free_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that no process uses."""
    return torch.cuda.mem_get_info(device)[0]


def total_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory."""
    return torch.cuda.get_device_properties(device).total_memory


present_bytes, peak_bytes = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
"""Bytes of this process's tensors now, and their peak since `forget_peak`."""
forget_peak = torch.cuda.reset_peak_memory_stats
peak_reserved_bytes, give_back = torch.cuda.max_memory_reserved, torch.cuda.empty_cache
"""Peak bytes that the allocator reserved; and a function that returns unused reserved memory to other processes."""


def limit_bytes(count: int, device: torch.device) -> None:
    """Limit the bytes that this process's allocator may reserve on the device."""
    torch.cuda.set_per_process_memory_fraction(count / total_bytes(device), device)


def random_states() -> list[Tensor]:
    """Return the random generator's state of every device; none where this process hasn't started CUDA."""
    # Not where a device is merely present: the call would start CUDA, which forked workers can't.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_states(states: list[Tensor]) -> None:
    """Restore the generators' states that `random_states` returned, if the number of devices is the same."""
    if states and len(states) == device_count():
        torch.cuda.set_rng_state_all(states)


random_state, set_random_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state  # Random state of one device.
