"""A norm in float64 is right, and writes nothing of the tensor's size."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute.norms import squared_norm


class Largest(TorchDispatchMode):
    """How many elements the largest result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t._base is None]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_it_is_the_sum_of_squares(dtype: torch.dtype) -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 7, 300)]
    expected = sum((torch.view_as_real(t) if t.is_complex() else t).double().square().sum() for t in tensors)
    found = squared_norm([*tensors, torch.empty(0, dtype=dtype)])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-13, atol=0)


def test_no_copy_of_the_tensor_is_written() -> None:
    with Largest() as largest:
        squared_norm([torch.ones(1000)[:999]])
    assert largest.elements == 1000, "the tensor itself, which was made within"
    tensor = torch.ones(1000)
    with Largest() as largest:
        squared_norm([tensor, tensor])
    assert largest.elements == 2
    with Largest() as largest:
        tensor.double().square().sum()
    assert largest.elements == 1000
