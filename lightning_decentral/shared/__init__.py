"""What the methods share: the strategy below all, checkpoints, the mean model, registration, loggers.

Below: `plan` (timeline, forecasts), `compute` (buckets, devices), `wire` (transport, agreement). Public: all names
below.
"""

from typing import TYPE_CHECKING

from lightning_decentral.shared.face import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.shared.loggers import Rows as Rows
    from lightning_decentral.shared.loggers import WandbPerWorker as WandbPerWorker

__getattr__, __all__ = lazy_exports(__name__)
