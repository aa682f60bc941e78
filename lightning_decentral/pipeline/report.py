"""Report of a pipelined run: speed against one process, bubble predicted and measured, a step's timeline."""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.table import Table

from lightning_decentral.pipeline.logs import Logs
from lightning_decentral.pipeline.strategy import TokenPipelineStrategy
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.timeline import Span, bubble, chrome_trace, makespan, write_chrome_trace

STEPS = 3
COLORS = {"F": "#9ecae1", "B": "#3182bd", "W": "#31a354"}


@checked
class PipelineReport(Callback):
    """Print a table when training has ended, and draw the last step's timeline next to its forecast.

    Files: `timeline.json`, for chrome://tracing or Perfetto, and `timeline.png` if matplotlib is installed. To
    compare, worker 0 runs three steps of the whole model alone, forward and backward without a pipeline, on the
    last batch. Under another strategy the callback does nothing.

    Args:
        directory: where the files are written.
    """

    def __init__(self, *, directory: str) -> None:
        self.directory = Path(directory)
        self._seconds: list[float] = []
        self._batch: Any = None
        self._found: dict[str, Span] = {}
        self._expected: dict[str, Span] = {}
        self._lines: dict[str, str] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        strategy = trainer.strategy
        if isinstance(strategy, TokenPipelineStrategy):
            self._seconds.append(strategy.step_seconds)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the timeline of the last step from all stages. Collective."""
        strategy = trainer.strategy
        if not isinstance(strategy, TokenPipelineStrategy) or not self._seconds:
            return
        self._found = strategy.measured()
        expected = strategy.expected()
        self._expected = {} if expected is None else expected.spans
        self._lines = strategy.summary()
        workers = [f"stage {r}" for r in range(strategy.num_stages)]
        self._lines["bubble"] += f"; {bubble(self._found, workers):.1%} measured in the last step"
        if expected is not None:
            self._lines["forecast"] = f"{expected.seconds:.4g} s a step, from the measured costs of its parts"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning calls this after teardown, which made the module whole again.
        if not self._found or not trainer.is_global_zero:
            return
        whole = _alone(pl_module, self._batch)
        piped = statistics.median(self._seconds[-20:])
        rows = {**self._lines, "seconds per step": f"{piped:.4g}, one process alone {whole:.4g}"}
        rows["speed"] = f"{whole / piped:.2f} x one process"
        table = Table(title="token pipeline", title_justify="left", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        Console().print(table)
        self.directory.mkdir(parents=True, exist_ok=True)
        begin = min(span.start for span in self._found.values())
        found = {name: Span(s.worker, s.start - begin, s.finish - begin) for name, s in self._found.items()}
        events = [*chrome_trace(found, "measured"), *chrome_trace(self._expected, "predicted")]
        write_chrome_trace(events, self.directory / "timeline.json")
        try:
            draw({"measured": found, "predicted": self._expected}, self.directory / "timeline.png")
        except ModuleNotFoundError:
            rank_zero_info("no timeline.png: matplotlib is not installed: pip install 'lightning-decentral[plot]'")
        Console().print(f"timeline   {self.directory}", soft_wrap=True, highlight=False)


def _alone(module: LightningModule, batch: Any) -> float:
    """Median seconds of the whole model's forward and backward on this worker alone."""
    times = []
    module.train()
    with Logs(module).recording(None):
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            module.training_step(batch, 0).backward()  # type: ignore[union-attr]
            times.append(time.perf_counter() - begin)
            module.zero_grad()
    return statistics.median(times[1:])  # the first step warms up


def draw(timelines: Mapping[str, Mapping[str, Span]], path: Path) -> None:
    """Draw a row per stage and timeline: forwards light, backwards dark, weights green, the slice's number inside."""
    from matplotlib.figure import Figure  # needs no display and leaves the user's pyplot state alone

    shown = {title: spans for title, spans in timelines.items() if spans}
    figure = Figure(figsize=(10, 1.2 + 1.3 * len(shown)), layout="tight")
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
    for axis, (title, spans) in zip(axes[:, 0], shown.items(), strict=True):
        stages = sorted({span.worker for span in spans.values()})
        for name, span in spans.items():
            kind, *_, index = name.split()
            row, start, width = stages.index(span.worker), 1e3 * span.start, 1e3 * (span.finish - span.start)
            axis.barh(row, width, left=start, color=COLORS[kind], edgecolor="white")
            axis.text(start + width / 2, row, index, ha="center", va="center", fontsize=7)
        axis.set_yticks(range(len(stages)), stages)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {1e3 * makespan(spans):.0f} ms", fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("milliseconds")
    figure.savefig(path, dpi=120)
