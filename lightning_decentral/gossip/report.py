"""Callbacks that print a table of the settings when a run starts, and write a report (CSV, pictures, JSON) at its end.

The report shows the bytes that were sent; `summary` shows the planned bytes."""

import csv
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_decentral.gossip.summary import Monitored, Tracked
from lightning_decentral.shared.compute.modules import evaluating
from lightning_decentral.shared.introduction import StartTable
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.figure import draw
from lightning_decentral.shared.plan.units import shown_bytes

UNKNOWN = float("nan")
PICTURES = ("report.png", "members.png")


@runtime_checkable
class Scored(Protocol):
    """Interface of a LightningModule that can score each example."""

    score_name: str

    def score(self, batch: Any) -> Tensor:
        """Return one score for each example, of shape [batch]."""


@runtime_checkable
class Attended(Monitored, Protocol):
    """Interface of an elastic strategy, whose workers come and go."""

    def draw_members(self, file: Path) -> None:
        """Draw which workers trained together in which rounds. ModuleNotFoundError without matplotlib."""


class StartSummary(StartTable):
    """Prints the settings when training begins: workers, topology, steps to consensus, bytes per worker and step.

    Loggers get the settings once, as hyperparameters `gossip/...` with numbers or class names. Without this callback
    the strategy prints one line."""

    def shows(self, strategy: Any) -> bool:
        return isinstance(strategy, Monitored)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, Monitored) or not trainer.is_global_zero:
            return
        table = Table(show_header=False, title="gossip", title_justify="left")
        for row in strategy.summary().items():
            table.add_row(*row)
        Console().print(table)
        settings = strategy.hyperparameters() if isinstance(strategy, Tracked) else strategy.summary()
        # With the user's own in one call, before Lightning logs these alone: TensorBoard's table shows the first call.
        given = (pl_module, getattr(trainer, "datamodule", None))
        sources = [one for one in given if one is not None and one._log_hyperparams]
        own = {key: one.hparams_initial[key] for one in sources for key in one.hparams_initial if key != "_class_path"}
        for logger in trainer.loggers:
            logger.log_hyperparams(own | {f"gossip/{name}": value for name, value in settings.items()})


@checked
class Report(Callback):
    """Writes report.csv, report.png and report.json when training ends, and prints a table after the test.

    For an elastic run members.png shows which workers trained together in which rounds.

    The table shows the test score of the evaluated model, the score of each worker's own model over the whole test set,
    bytes sent, seconds waited for the exchange, and the consensus distance. Workers' own scores need a datamodule and a
    module with `score(batch)` and `score_name`; the evaluated model's score is the logged metric `test/<score_name>`.

    Cost: at the end of training every worker goes over the whole test set once, and all workers all-reduce the
    parameters and a few numbers. Under a strategy that does not gossip the report has only the logged metrics.

    Args:
        directory: folder for the files; use a new one for each training.
    """

    def __init__(self, *, directory: str) -> None:
        self.directory = Path(directory)
        self._rows = Rows(self.directory)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._rows = Rows(self.directory)
            # A fit after another begins with empty rows.
            others = [logger for logger in trainer.loggers if not isinstance(logger, Rows)]
            trainer.loggers = [*others, self._rows]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Collective, and here: after this the strategy makes all workers' models equal.
        result = _outcome(trainer, pl_module) if isinstance(trainer.strategy, Monitored) else {}
        if trainer.is_global_zero:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "report.json").write_text(json.dumps(result, indent=2))
            rows = self._rows.rows
            with (self.directory / "report.csv").open("w", newline="") as file:
                columns = {key for row in rows for key in row} - {"step"}
                writer = csv.DictWriter(file, fieldnames=["step", *sorted(columns)])
                writer.writeheader()
                writer.writerows(rows)
            self._draw(trainer.strategy)

    def _draw(self, strategy: object) -> None:
        curves, members = (self.directory / name for name in PICTURES)
        try:
            draw(self._rows.rows, curves)
            if isinstance(strategy, Attended):
                strategy.draw_members(members)
        except ModuleNotFoundError:
            print("no report.png: matplotlib is not installed: pip install 'lightning-decentral[plot]'")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        file = self.directory / "report.json"
        if not trainer.is_global_zero or not file.exists():
            return
        console = Console()
        # From the file: training may have been in another process.
        result = json.loads(file.read_text())
        console.print(_table(result, trainer, pl_module))
        lines = _places(self.directory, trainer)
        if "consensus_distance" in result:
            absolute, relative = result["consensus_distance"], result["consensus_distance_relative"]
            percent = f"{100 * relative:.3g} % of the parameters' norm"
            lines.insert(0, f"{'distance':<11}{absolute:.4g} from consensus when training ended, {percent}")
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)


# ---- measurements -----------------------------------------------------------------------------------------------


def _outcome(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    strategy: Any = trainer.strategy
    error, traffic = strategy.consensus(), strategy.traffic()
    mine = [_own_score(trainer, pl_module), traffic.bytes_sent, traffic.wait_seconds, traffic.refused]
    names = ("score", "bytes_sent", "seconds_waited", "refused_messages")
    rows = strategy.gather(mine)
    return {
        "workers": [dict(zip(names, map(_known, values), strict=True)) for values in rows],
        "consensus_distance": error.absolute,
        "consensus_distance_relative": error.relative,
        "evaluated": strategy.summary().get("evaluated", "evaluated model"),
    }


@torch.no_grad()
def _own_score(trainer: Trainer, pl_module: LightningModule) -> float:
    """(1/N) sum_e score(e) of this worker's own model over all N test examples; NaN without datamodule or `score`."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is None or not isinstance(pl_module, Scored):
        return UNKNOWN
    datamodule.setup("test")
    total, examples = 0.0, 0
    with evaluating(pl_module), trainer.precision_plugin.test_step_context():
        for batch in datamodule.test_dataloader():
            scores = pl_module.score(trainer.strategy.batch_to_device(batch))
            total, examples = total + float(scores.double().sum()), examples + scores.numel()
    return total / examples if examples else UNKNOWN


# ---- tables ------------------------------------------------------------------------------------------------------


def _table(result: Mapping[str, Any], trainer: Trainer, pl_module: LightningModule) -> Table:
    name = pl_module.score_name if isinstance(pl_module, Scored) else "score"
    table = Table(title="result", title_justify="left")
    for column in ("", f"test {name}", "sent", "waited for exchange"):
        table.add_column(column, justify="right" if column else "left")
    score = _known(float(trainer.callback_metrics.get(f"test/{name}", UNKNOWN)))
    workers = result.get("workers", [])
    sent = f"{shown_bytes(sum(worker['bytes_sent'] for worker in workers))} in all" if workers else ""
    table.add_row(result.get("evaluated", "model"), _number(score), sent, "", style="bold")
    for rank, worker in enumerate(workers):
        waited = f"{worker['seconds_waited']:.2f} s"
        table.add_row(f"worker {rank}'s own model", _number(worker["score"]), shown_bytes(worker["bytes_sent"]), waited)
    return table


def _places(directory: Path, trainer: Trainer) -> list[str]:
    checkpoint = trainer.checkpoint_callback
    path = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
    written = [directory / name for name in ("report.csv", *PICTURES) if (directory / name).exists()]
    named = [("checkpoint", path)] if path else []
    named += [("metrics" if file.suffix == ".csv" else "picture", str(file)) for file in written]
    here, resolved = Path.cwd().resolve(), [(name, Path(place).resolve()) for name, place in named]
    return [f"{name:<11}{p.relative_to(here) if p.is_relative_to(here) else p}" for name, p in resolved]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _known(value: float) -> float | None:
    # JSON has no NaN.
    return None if value != value else value


class Rows(Logger):
    """Keeps worker 0's logged metrics in memory, one row per step.

    Lightning puts checkpoints into the directory if no other logger has a folder."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._rows: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._directory)

    @property
    def rows(self) -> list[dict[str, float]]:
        """Rows of logged metrics, in order of steps; each row's first key is "step"."""
        return [{"step": step, **self._rows[step]} for step in sorted(self._rows)]

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is not None:
            self._rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""
