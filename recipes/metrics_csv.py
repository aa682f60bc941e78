"""The metrics of a run as one CSV file, whichever processes of the run write to it."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class MetricsCSV(CSVLogger):
    """A CSVLogger that goes on with the file of an earlier process of the same run.

    Started by spawn or fork, training and test log in processes of their own; the second one of CSVLogger doesn't know
    the columns that stand in the file, and fails.
    """

    @rank_zero_only
    def save(self) -> None:
        """Write the rows so far, under the columns of the file and new ones."""
        writer = self.experiment
        file = Path(writer.metrics_file_path)
        if not writer.metrics_keys and file.exists():
            with file.open(newline="") as rows:
                writer.metrics_keys = next(csv.reader(rows), [])
        super().save()
