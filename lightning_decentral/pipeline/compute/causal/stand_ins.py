"""Stand-ins in a stage for parts of other stages, so that the model's own forward runs from its begin to its end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.refusals import original

PLAIN = (str, int, float)


class Out(BaseException):
    """Ends a forward where the stage ends, with what it came to."""

    def __init__(self, result: Tensor) -> None:
        self.result = result


class Hollow(nn.Module):
    """Stands for a block of another stage; has its plain attributes, by which models choose masks.

    Args:
        pass_on: what it does with the hidden state.
    """

    def __init__(self, block: nn.Module, pass_on: Callable[[Tensor], Any]) -> None:
        super().__init__()
        own = vars(original(block))
        vars(self).update({name: value for name, value in own.items() if isinstance(value, PLAIN) and name[0] != "_"})
        self._pass_on = pass_on

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass_on(args[0] if args else kwargs["hidden_states"])


class Silent(nn.Module):
    """0: stands for an embedding that another stage has already added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.zeros((), dtype=self._dtype, device=given.device)


class FixedOutput(nn.Module):
    """Returns what is known already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._result


def take_out(hidden: Tensor) -> Any:  # (batch, tokens, width)
    raise Out(hidden)


def take_out_result(_module: nn.Module, _args: Any, result: Any) -> None:
    raise Out(result)
