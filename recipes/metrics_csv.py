"""The metrics of a run as one CSV file, whichever processes of the run write to it."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.csv_logs import CSVLogger, ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class MetricsCSV(CSVLogger):
    """A CSVLogger that goes on with the file of an earlier process of the same run.

    Started by spawn or fork, training and test log in processes of their own; the second one of CSVLogger doesn't know
    the columns that stand in the file, and fails. Where workers come and go, any of them may be the next that logs; as
    only the one that was started first begins a run's files, the others go on with them.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None and os.environ.get("LOCAL_RANK", "0") != "0":
            self._experiment = _Continuing(self.log_dir)
        writer: ExperimentWriter = super().experiment
        return writer

    @rank_zero_only
    def save(self) -> None:
        """Write the rows so far, under the columns of the file and new ones."""
        writer = self.experiment
        file = Path(writer.metrics_file_path)
        if not writer.metrics_keys and file.exists():
            with file.open(newline="") as rows:
                writer.metrics_keys = next(csv.reader(rows), [])
        super().save()


class _Continuing(ExperimentWriter):
    """Leaves what is there: the base deletes it."""

    def _check_log_dir_exists(self) -> None:
        return
