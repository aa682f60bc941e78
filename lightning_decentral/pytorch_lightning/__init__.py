"""The same strategies for Trainers of `pytorch_lightning`, which has classes of its own where `lightning` has others.

Names work in both: `pytorch_lightning.Trainer(strategy="gossip")` after `import lightning_decentral`. Classes are
imported from here, with the same options; topologies, rules and codecs don't use Lightning: there is one of each.

    from lightning_decentral.gossip import Ring
    from lightning_decentral.pytorch_lightning import GossipStrategy

`mirror` makes each module that binds to Lightning from its one text, a second time under this name; so callbacks are in
`lightning_decentral.pytorch_lightning.gossip`. Public: all strategies."""

from importlib import import_module
from typing import Any

import lightning_decentral
from lightning_decentral.pytorch_lightning import mirror

__all__ = list(lightning_decentral.STRATEGIES)

mirror.use()


def __getattr__(name: str) -> Any:
    if name not in lightning_decentral.STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{lightning_decentral.STRATEGIES[name]}"), name)
