"""What the methods share: the strategy below all, checkpoints, the mean model, registration, loggers.

Below: `plan` (timeline, forecasts), `compute` (buckets, devices), `wire` (transport, agreement). Public: all names
below.
"""

from lightning_decentral.shared.loggers import Rows, WandbPerWorker

__all__ = [
    "Rows",
    "WandbPerWorker",
]
