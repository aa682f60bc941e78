"""The strategies that Lightning's own tests are given in place of `ddp`, by name."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import Complete

WAIT = {"timeout": timedelta(seconds=30)}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DDPStrategy,
    "gossip, exact": lambda **ddp: GossipStrategy(topology=Complete(), delay=0, **ddp),
    "gossip": GossipStrategy,
    "compressed": CompressedStrategy,
    "partial_backprop": PartialBackpropStrategy,
}
# As forks of the test's process: "popen" would start pytest again, and new interpreters take seconds.
REPLACED = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")

swapped: list[str] = []
"""What this test's Trainers asked for, one word each."""


def install(name: str, alone: bool) -> None:
    """Every Trainer that asks for `ddp` by name gets this one; `alone`: one device's that asks for nothing, too."""
    connect = _AcceleratorConnector.__init__

    def connected(self: _AcceleratorConnector, *args: Any, **options: Any) -> None:
        asked = options.get("strategy", "auto")
        # Another accelerator has strategies of its own.
        if isinstance(asked, str) and options.get("accelerator", "auto") in ("auto", "cpu"):
            single = alone and asked == "auto" and options.get("devices", "auto") in ("auto", 1, "1")
            if single or asked in REPLACED:
                swapped.append(asked)
                # One worker is in the test's own process then.
                options["strategy"] = STRATEGIES[name](start_method="popen" if single else "fork", **WAIT)
        connect(self, *args, **options)

    _AcceleratorConnector.__init__ = connected  # type: ignore[method-assign]
