"""Functions of libraries are replaced wherever they were imported to, and come back whole."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_decentral.shared.compute.around.redirect import Redirected

pytestmark = pytest.mark.quick


def twice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return 2 * original(*args, **kwargs)


def test_a_function_that_was_imported_before_is_replaced_until_close() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    redirected = Redirected(get_total_norm, twice)
    assert float(get_total_norm([torch.ones(4)], norm_type=1.0)) == 8, "defaults and names of arguments stay"
    assert float(clip_grad_norm_([parameter], 100.0)) == 4, "within the library, too"
    redirected.close()
    assert float(get_total_norm([torch.ones(4)])) == 2


def test_one_function_of_a_module_at_a_time_and_others_beside_it() -> None:
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    first = Redirected(grad_norm, lambda original, *args: sorted(original(*args)))
    second = Redirected(torch.nn.Module.named_parameters, lambda original, *args, **kwargs: iter(()))
    assert grad_norm(layer, 2) == []
    with pytest.raises(AssertionError, match="one function of a module at a time"):
        Redirected(grad_norm, twice)
    second.close()
    assert len(grad_norm(layer, 2)) == 3
    first.close()
    assert isinstance(grad_norm(layer, 2), dict)
    assert functools.reduce(lambda n, p: n + p.numel(), layer.parameters(), 0) == 6
