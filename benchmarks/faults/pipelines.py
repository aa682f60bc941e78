"""Elastic runs of two token pipelines, one of which loses a stage: the other one goes on, and a new one takes part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from faults.kinds import REACHED, STEP, Act, changed, fail, kill, marked, on, slow, stop
from faults.row import Place, Row
from faults.runs import GOES_ON, TRACEBACK, Outcome, Run, disturbed, judged, unsound
from faults.worker import Fault, Worker, meeting
from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import serve
from lightning_decentral.gossip import Elastic, GossipReplicas

STAGES, DEAD_AFTER = 2, 3.0
LOBBY, STRUCK, OTHER, NEW = range(4)
"""Processes' places: the lobby is the first, and each pipeline has the ones behind it."""
STEPS, LONG, STEP_SECONDS = 60, 150, 0.05
"""Steps of an epoch, the only one; where a new pipeline must have come before its end; seconds of a step."""
BOTH = "both"  # file of a run in which a pipeline met another one
STRATEGY = "token_pipeline, elastic"


class Meets(Callback):
    """Leaves a file when this pipeline has trained with another one, and does something in a later step."""

    def __init__(self, file: Path, act: Act = lambda module: None) -> None:
        self._file, self._act = file, act

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self._file.exists() and trainer.global_step >= STEP:
            self._act(module)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if len(strategy.members) > 1:
            self._file.touch()


def in_a_step(act: Act, file: Path) -> Fault:
    """Inject the fault in a step behind the one in which the pipelines met."""
    return lambda worker: worker.callbacks.append(Meets(file, marked(act, worker)))


def lost(act: Act, stage: int, replaced: bool = False) -> Row:
    """A stage of one of two pipelines ends. replaced: when all of it has ended, a new one is started."""

    def run(place: Place) -> Outcome:
        started = Run(place.folder / "run", place.seconds)
        lobby = Bounds(1, 2), Times(DEAD_AFTER), "127.0.0.1", place.port, lambda port: None
        started.start(lambda: serve(*lobby), {})
        steps = LONG if replaced else STEPS
        fault = on(stage, in_a_step(act, started.folder / f"{BOTH}-{STRUCK}"))
        _start(started, place, STRUCK, fault, steps=steps)
        _start(started, place, OTHER, steps=steps)
        victims = [0, *range(1, STAGES + 1)]
        if replaced:
            for process in started.processes[1 : STAGES + 1]:
                started.wait_for(process.poll)
            _start(started, place, NEW, steps=LONG)
        started.wait(victims)
        met = [started.folder / f"{BOTH}-{who}" for who in ((STRUCK, NEW) if replaced else (STRUCK,))]
        if not (started.folder / REACHED).exists() or not all(file.exists() for file in met):
            return Outcome(TRACEBACK, f"pipelines didn't train together, {[file.name for file in met]}")
        return judged(started, victims, lambda: unsound(started.folder))

    name = {kill: "killed", stop: "stopped (SIGSTOP)", fail: "raises"}[act]
    what = f"stage {stage} of a pipeline {name} in a step" + (", and a new pipeline is started" if replaced else "")
    return Row("a worker ends", what, STRATEGY, (GOES_ON,), run)


def _start(run: Run, place: Place, who: int, *faults: Fault, steps: int) -> None:
    """Start the stages of a pipeline."""
    elastic = Elastic(lobby=f"127.0.0.1:{place.port}", workers=(1, 2), dead_after=DEAD_AFTER, host="127.0.0.1")
    own = changed(
        strategy={"replicas": GossipReplicas(elastic=elastic)},
        trainer={"max_epochs": 1},
        lengths=(steps, 2),
        callbacks=[Meets(run.folder / f"{BOTH}-{who}")],
    )
    for stage in range(STAGES):
        worker = Worker("token_pipeline", stage, STAGES, run.folder / "checkpoints")
        run.start(
            lambda worker=worker: disturbed(worker, (own, slow(STEP_SECONDS), *faults)),  # type: ignore[misc]
            meeting(stage, STAGES, place.port + 1 + who),
        )


def rows() -> Iterator[Row]:
    for act in (kill, stop, fail):
        for stage in range(STAGES):
            yield lost(act, stage)
    for stage in range(STAGES):
        yield lost(kill, stage, replaced=True)
