"""One run of a case in its workers, and what a worker would have done alone: a plain Trainer, one process, known
gradients."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.compressed import FabricCompressedStrategy
from lightning_decentral.gossip import Elastic, FabricGossipStrategy
from lightning_decentral.partial import FabricPartialBackpropStrategy, Full
from lightning_decentral.pipeline import Uniform
from lightning_decentral.shared.wire.fsdp import full_tensor, local
from tests.tiny import QUIET
from tests.together.pool import MEETING
from tests.together.probe import (
    BEFORE_A_STEP,
    WRITTEN,
    WRITTEN_AT_END,
    Examples,
    Happenings,
    Probe,
    Replay,
    Rows,
    apart,
    count,
    fail,
    optimizers_of,
    schedule_of,
)
from tests.together.space import BATCHES, EPOCHS, STAGES, STEPS, Case, differs, given_to

Named = dict[str, Tensor]
TIMEOUT = timedelta(seconds=20)
RESUMED = "resume.ckpt"


class Sends:
    """Bytes of the messages from one worker to another, counted where torch takes them."""

    counted = 0

    @classmethod
    def watch(cls) -> None:
        """From now on in this process, from zero."""
        cls.counted = 0
        if not hasattr(dist.ProcessGroup, "_sends"):
            dist.ProcessGroup._sends = send = dist.ProcessGroup.send

            def counting(group: Any, tensors: list[Tensor], *args: Any) -> Any:
                cls.counted += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                return send(group, tensors, *args)

            dist.ProcessGroup.send = counting


@dataclass
class Seen:
    """What one worker took down."""

    first: Named
    own: Named
    """Where training ended, before the workers met."""
    last: Named
    """The model that is handed back."""
    alone: Named
    """What the module of this worker, or of its island, would have become alone."""
    rows: list[list[float]]
    steps: int
    validated: dict[int, Named] = field(default_factory=dict)
    saved: dict[int, Named] = field(default_factory=dict)
    resumed: Named = field(default_factory=dict)
    healed: int = 0
    sent_bytes: tuple[int, int] = (0, 0)
    """(as the strategy says, as counted), where training ended."""
    optimizer: list[Tensor] = field(default_factory=list)


def run(case: Case, rank: int, folder: str, lobby: str, accounted: bool = True) -> Seen:
    """In the worker `rank`. Raises what the run raises.

    Args:
        accounted: whether what it would have become alone is asked for.
    """
    torch.manual_seed(5)
    if case["loop"] == "Fabric":
        return _by_fabric(case, rank, Path(folder), accounted)
    if case["method"] == "elastic":  # each worker is a world of its own to Lightning
        for name in MEETING:
            os.environ.pop(name)
    return _by_trainer(case, rank, Path(folder), lobby, accounted)


def strategy_of(case: Case, rank: int, lobby: str) -> Any:
    given = {"timeout": TIMEOUT, **given_to(case, rank)}
    if case["method"] == "elastic":
        given["timeout"] = timedelta(seconds=12) if differs(case) else TIMEOUT  # those who agree wait for more workers
        return GossipStrategy(
            elastic=Elastic(lobby=lobby, workers=case.bounds, dead_after=5.0, host="127.0.0.1"), **given
        )
    if case["method"] == "spilled":
        return SpilledStrategy(memory_bytes=10**7, blocks=["trunk.lower", "trunk.upper"])
    return STRATEGIES[case["method"]](**FIXED.get(case["method"], {}), **given)


STRATEGIES = {
    "gossip": GossipStrategy,
    "compressed": CompressedStrategy,
    "partial": PartialBackpropStrategy,
    "pipeline": TokenPipelineStrategy,
    "pipelines": TokenPipelineStrategy,
}
FABRIC = {
    "gossip": FabricGossipStrategy,
    "compressed": FabricCompressedStrategy,
    "partial": FabricPartialBackpropStrategy,
}
STAGED = {"stages": STAGES, "slicing": Uniform(1)}
FIXED = {"partial": {"depth": Full(), "cuts": ["trunk.upper"]}, "pipeline": STAGED, "pipelines": STAGED}


def _trainer(
    case: Case, strategy: Any, devices: int, happenings: Happenings, validates: bool, steps: int = -1
) -> Trainer:
    at = next((event.at for event in case.events if event.kind == "validate"), None)
    given: dict[str, Any] = {"max_epochs": EPOCHS, "precision": case["precision"], "callbacks": [happenings]}
    given |= {"accumulate_grad_batches": int(case["accumulate"])}
    clipping = {"norm": {"gradient_clip_val": 0.5}, "value": {"gradient_clip_val": 0.3}}.get(case["clip"], {})
    given |= {**clipping, **({"gradient_clip_algorithm": "value"} if case["clip"] == "value" else {})}
    given |= {"limit_val_batches": 0} if at is None or not validates else {"val_check_interval": at % 5 + 1}
    return Trainer(**QUIET, **given, devices=devices, strategy=strategy, max_steps=steps)


def _loader(case: Case, rank: int) -> Any:
    return DataLoader(Examples(BATCHES * case.workers)) if case["method"] == "elastic" else Rows(case.examples(rank))


def _by_trainer(case: Case, rank: int, folder: Path, lobby: str, accounted: bool) -> Seen:
    first = copied(Probe(case))
    happenings = Happenings(case, rank, folder, True, lambda: Sends.counted)
    offset = 0 if case["method"] == "elastic" else rank
    module, strategy = Probe(case, offset, rank == case.workers - 1), strategy_of(case, rank, lobby)
    trainer = _trainer(case, strategy, _devices(case), happenings, validates=True)
    Sends.watch()
    fit(trainer, module, _loader(case, rank), case)
    own, last = happenings.own, copied(module)
    files = {at: torch.load(path)["state_dict"] for at, path in happenings.saved.items() if not case.has("stop")}
    states = [
        local(v) for o in trainer.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)
    ]
    steps = trainer.global_step if case.has("stop") else -1
    quiet = Happenings(case, rank, folder, writes=False)
    alone = _alone(case, rank, quiet, happenings.taken, steps) if accounted else {}
    seen = Seen(first, own, last, alone, happenings.rows, trainer.global_step)
    seen.sent_bytes = happenings.sent_bytes
    seen.validated, seen.saved, seen.healed, seen.optimizer = happenings.validated, files, happenings.healed, states
    if case.has("resume"):
        seen.resumed = _resumed(case, rank, folder, lobby)
    return seen


def _devices(case: Case) -> int:
    return 1 if case["method"] == "elastic" else case.workers


def fit(trainer: Trainer, module: Any, rows: Any, case: Case, **given: Any) -> None:
    loaders = (rows, [torch.zeros(1)]) if trainer.limit_val_batches else (rows,)
    trainer.fit(module, *loaders, **given)
    if case.has("refit"):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, *loaders)


def _resumed(case: Case, rank: int, folder: Path, lobby: str) -> Named:
    """The end of the run that goes on from the file."""
    happenings = Happenings(case, rank, folder / "again", writes=True)
    (folder / "again").mkdir(exist_ok=True)
    happenings.done.add("resume")
    module = Probe(case, rank, rank == case.workers - 1)
    trainer = _trainer(case, strategy_of(case, rank, lobby), case.workers, happenings, validates=True)
    fit(trainer, module, _loader(case, rank), case, ckpt_path=folder / RESUMED)
    return copied(module)


def run_elsewhere(case: Case, rank: int, folder: Path, at: int, accounted: bool) -> Seen:
    """The end of the run that goes on, by these workers, from the file that others wrote at batch `at`."""
    torch.manual_seed(5)
    (folder / "elsewhere").mkdir(exist_ok=True)
    happenings = Happenings(case, rank, folder / "elsewhere", writes=True)
    module, strategy = Probe(case, rank), strategy_of(case, rank, "")
    trainer = _trainer(case, strategy, case.workers, happenings, validates=False)
    fit(trainer, module, _loader(case, rank), case, ckpt_path=folder / RESUMED)
    first = torch.load(folder / RESUMED)["state_dict"]
    quiet, left = Happenings(case, rank, folder, writes=False), BATCHES - 1 - at % BATCHES
    alone = _alone(case, rank, quiet, happenings.taken, -1, left, folder / RESUMED) if accounted else {}
    return Seen(first, happenings.own, copied(module), alone, happenings.rows, trainer.global_step)


def _alone(
    case: Case,
    rank: int,
    happenings: Happenings,
    taken: Sequence[Tensor],
    steps: int,
    left: int = BATCHES,
    file: Path | None = None,
) -> Named:
    """One process, which has the gradients of all devices of this worker: those of an island, or all.

    Args:
        left: batches of the first epoch.
        file: from which it goes on.
    """
    size = case.workers // case.replicas
    place = rank // size * size
    group = dict.fromkeys(example for device in range(place, place + size) for example in case.examples(device))
    module = Probe(case)
    trainer = _trainer(case, "auto", 1, happenings, False, steps)
    fit(trainer, module, Replay(taken, list(group), left), case, ckpt_path=file)
    return copied(module)


def copied(module: Any) -> Named:
    return {name: full_tensor(value.detach()).clone() for name, value in module.state_dict().items()}


# ---- loops with Fabric -----------------------------------------------------------------------------------------------


def _by_fabric(case: Case, rank: int, folder: Path, accounted: bool) -> Seen:
    made = FABRIC[case["method"]](timeout=TIMEOUT, **FIXED.get(case["method"], {}), **given_to(case, rank))
    precision: Any = case["precision"]
    fabric = Fabric(accelerator="cpu", devices=case.workers, strategy=made, precision=precision)
    fabric.launch()
    first = copied(Probe(case))
    loop = Loop(case, rank, fabric, Probe(case, rank, rank == case.workers - 1), folder)
    loop.train()
    own = {name: value.detach().clone() for name, value in loop.probe.named_parameters()}
    if case.has("write at end"):
        loop.write(WRITTEN_AT_END)
    made.finish()
    alone = Loop(case, rank, Fabric(accelerator="cpu", devices=1, precision=precision), Probe(case), None)
    if accounted:
        alone.train()
    return Seen(first, own, copied(loop.probe), copied(alone.probe) if accounted else {}, loop.sums, STEPS)


class Loop:
    """A user's own loop, with the events that a Trainer's callbacks would make happen.

    Args:
        folder: None: of one process, which is a reference.
    """

    def __init__(self, case: Case, rank: int, fabric: Fabric, probe: Probe, folder: Path | None) -> None:
        self.case, self.rank, self.fabric, self.probe, self.folder = case, rank, fabric, probe, folder
        optimizers = optimizers_of(probe, case)
        self._module, *self._optimizers = fabric.setup(probe, *optimizers)
        self._scheduler = schedule_of(optimizers[0], case["schedule"])
        self.sums: list[list[float]] = []

    def train(self) -> None:
        # A reference without others has the gradients of all where replicas stay equal.
        shared = self.folder is None and self.case.replicas == 1
        rows = Rows(range(self.case.workers) if shared else [self.rank])
        for batch in (batch for _ in range(EPOCHS) for batch in rows):
            self._happen(batch, BEFORE_A_STEP, "kill")
            for number, optimizer in enumerate(self._optimizers):
                if self.case["optimizer"] != "turns" or count(batch) % 2 == number:
                    optimizer.zero_grad()
                    self.fabric.backward(self._module(batch))
                    optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            if self.folder is not None:
                (self.folder / f"began-{self.rank}").touch()
            self._happen(batch, (), "write", "apart")
            self.sums.append([float(p.detach().double().sum()) for p in self.probe.parameters()])

    @torch.no_grad()
    def write(self, value: float) -> None:
        """As a user's loop that puts averages in place."""
        for parameter in self.probe.parameters():
            parameter.fill_(value)

    @torch.no_grad()
    def _happen(self, batch: Tensor, changes: Iterable[str], *kinds: str) -> None:
        for event in (event for event in self.case.events if event.at == count(batch)):
            if event.kind in changes:
                BEFORE_A_STEP[event.kind](None, self.probe)
            elif event.kind in kinds and event.kind != "kill":
                for parameter in self.probe.parameters():
                    parameter.add_(WRITTEN if event.kind == "write" else apart(self.rank, self.case))
            elif event.kind in kinds and event.who == self.rank and self.folder is not None:
                fail(event.kind)
