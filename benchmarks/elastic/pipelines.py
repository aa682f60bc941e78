"""What a token pipeline that loses a stage costs an elastic run, and when its replacement takes part, on one machine.

    python benchmarks/elastic.py pipelines                      # three pipelines of two stages: some ten minutes
    python benchmarks/elastic.py pipelines --losses 2 --storms 0

A pipeline is one member of the run. One of its stages is killed (kill -9), the first and the last one in turn. A new
pipeline is started when the other stages have ended by themselves; a torchrun of the same host would end them sooner:

losses  `beyond`: the longest step of another pipeline that ends within a second of the kill, or among its next five,
        less its median step, `usual`. `ended`: seconds until the lost pipeline's other stage has ended. `joined`:
        until the replacement's first step has begun; its processes are forked from one that has everything
        imported. `missed`: steps of the run between the lost pipeline's last one and the replacement's first
storms  the same steps without faults and with them, in turn: a stage killed or stopped for 1 to 3 s; whoever is lost is
        started again `--restart` seconds later

Machines with other work take longer: results have the load average before and after, and ratios are of runs in turn.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from common.hardware import description, slug
from elastic.costs import beyond_a_step, fresh, stormed
from elastic.run import FORK, Here, Row, Run, took
from elastic.worker import Job, Tell, begin
from faults.worker import meeting
from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.gossip import Elastic, GossipReplicas
from lightning_decentral.pipeline import Given

STAGES, BATCH, ENDING_SECONDS = 2, 8, 15.0
LENGTH, VOCABULARY = 16, 32
EPOCH, HELD_OUT = 50, 4
"""Batches of a pipeline in a pass over the data; batches that are validated behind it."""


class Language(LightningModule):
    """GPT-2 of two blocks that learns an affine rule of tokens, of which one in eight is random."""

    def __init__(self, members: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.members = members
        quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": STAGES, "n_head": 2, "n_positions": LENGTH}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **quiet, bos_token_id=None, eos_token_id=None))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(sequences(2, EPOCH * self.members * BATCH)), BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(sequences(3, HELD_OUT * BATCH)), BATCH)


def sequences(seed: int, number: int) -> Tensor:
    """[number, LENGTH]: x' = 5 x + 3 mod VOCABULARY, or any token."""
    draw = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, VOCABULARY, (number,), generator=draw)]
    for _ in range(LENGTH - 1):
        any_token = torch.randint(0, VOCABULARY, (number,), generator=draw)
        ruled = (5 * columns[-1] + 3) % VOCABULARY
        columns.append(torch.where(torch.rand(number, generator=draw) < 1 / 8, any_token, ruled))
    return torch.stack(columns, 1)


class PipelineTell(Tell):
    """Callback that writes a line for each step of a stage, and for each validated loss."""

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.tell("validated", step=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))


def train(parent: int, job: Job, name: str, stage: int, port: int) -> None:
    """A stage, until the run or the parent process ends. The first one's lines are the pipeline's."""
    os.environ.update(meeting(stage, STAGES, port))
    own = name if not stage else f"{name}-stage{stage}"
    begin(parent, job, own)
    least = max(1, job.workers // 2)
    elastic = Elastic(lobby=job.lobby, workers=(least, job.workers), dead_after=job.dead_after, host=job.host)
    strategy: Any = TokenPipelineStrategy(
        replicas=GossipReplicas(elastic=elastic), slicing=Given((LENGTH // 2,) * 2), process_group_backend="gloo"
    )
    tell = PipelineTell(job, own)
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=STAGES,
        max_steps=job.steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        callbacks=[tell],
        logger=False,
        **quiet,
    )
    trainer.fit(Language(job.workers))
    tell.tell("end", loss=float(trainer.callback_metrics["val_loss"]))


class Stages:
    """The processes of a pipeline, used as one; a fault is done to one of them.

    Args:
        struck: stage that faults are done to.
    """

    def __init__(self, processes: Sequence[Any], struck: int) -> None:
        self.processes, self.struck = processes, struck

    @property
    def pid(self) -> int:
        return int(self.processes[self.struck].pid)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def join(self) -> None:
        for process in self.processes:
            process.join()

    def lose(self) -> float | None:
        """Kill that stage; return the seconds until the others have ended by themselves.

        None where they were still meeting, and would wait for it: they are killed, as by torchrun.
        """
        began = time.monotonic()
        self.processes[self.struck].kill()
        while not all(process.exitcode is not None for process in self.processes):
            if time.monotonic() > began + ENDING_SECONDS:
                self.kill()
                self.join()
                return None
            time.sleep(0.01)
        return time.monotonic() - began


class Pipelines(Run):
    """A `Run` whose workers are pipelines. ended: seconds from the loss of a stage to the end of the others."""

    def __init__(self, job: Job, place: Here) -> None:
        super().__init__(job, place)
        self.ended: dict[str, float | None] = {}

    def begun(self, host: int, job: Job, name: str) -> Any:
        port = find_free_network_port()
        processes = [
            FORK.Process(target=self._at, args=(host, train, os.getpid(), job, name, stage, port))
            for stage in range(STAGES)
        ]
        for process in processes:
            process.start()
        return Stages(processes, struck=len(self.names) % STAGES)

    def lose(self, name: str) -> float:
        at = time.monotonic()
        self.ended[name] = seconds = self.alive.pop(name).lose()
        if seconds is None:
            logs = sorted(self.job.folder.glob(f"{name}*.log"))
            print(f"{name} was meeting: {[log.read_text().strip().rpartition(chr(10))[2] for log in logs]}", flush=True)
        return at

    def fallen(self) -> list[str]:
        stages = dict(self.alive)
        gone = super().fallen()
        for name in gone:
            stages[name].kill()
        return gone


def losses(job: Job, place: Here, number: int, seed: int) -> list[Row]:
    """Kill so many stages, the first and the last one of a pipeline in turn."""
    draw, found = random.Random(seed), []
    with Pipelines(job, place) as run:
        run.until(run.warm)
        for turn in range(number):
            time.sleep(draw.uniform(0.5, 1.5))
            name = draw.choice(sorted(run.alive))
            run.alive[name].struck = stage = turn % STAGES * (STAGES - 1)
            at = run.lose(name)
            others, newcomer = list(run.alive), run.start()
            run.until(lambda name=newcomer: len(run.said(name, "step")) > 5)  # type: ignore[misc]
            run.until(lambda at=at: all(run.said(name, "step")[-1]["at"] > at + 1 for name in run.alive))  # type: ignore[misc]
            first, second = run.said(newcomer, "step")[:2]
            assert run.ended[name] is not None, f"a stage of {name} lives on without stage {stage}"
            row: Row = {
                "stage": stage,
                "beyond": [beyond_a_step(took(run.said(other, "step")), at) for other in others],
                "usual": statistics.median(s for o in others for when, s in took(run.said(o, "step")) if when < at),
                "ended": run.ended[name],
                "joined": first["at"] - (second["at"] - first["at"]) - at,
                "missed": first["step"] - run.said(name, "step")[-1]["step"] - 1,
            }
            found.append(row)
            print(f"stage {stage} killed: {row}", flush=True)
    return found


def storms(job: Job, place: Here, pairs: int, faults_per_hour: float, restart: float, seed: int) -> list[Row]:
    """The same steps calm and stormy; every pair begins with the other one."""
    found = []
    for pair in range(pairs):
        row: Row = {}
        for name, rate in (("calm", 0.0), ("storm", faults_per_hour))[:: -1 if pair % 2 else 1]:
            row[name] = stormed(replace(job, folder=fresh(job)), place, rate, restart, seed + pair, Pipelines)
        row["share"] = row["calm"]["seconds"] / row["storm"]["seconds"]
        found.append(row)
        print(f"storm: {row}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3, help="pipelines")
    parser.add_argument("--losses", type=int, default=16)
    parser.add_argument("--storms", type=int, default=4, help="pairs of a calm run and a stormy one")
    parser.add_argument("--storm-steps", type=int, default=900)
    parser.add_argument("--faults-per-hour", type=float, default=360.0)
    parser.add_argument("--restart", type=float, default=5.0)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--dead-after", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / f"elastic-pipelines-{slug()}.json")
    told = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), told.workers, -1, told.sleep, told.dead_after)
        long = replace(job, steps=told.storm_steps)
        rows = {
            "losses": losses(replace(job, folder=fresh(job)), Here(), told.losses, told.seed) if told.losses else [],
            "storms": storms(long, Here(), told.storms, told.faults_per_hour, told.restart, told.seed),
        }
    settings = {name: value for name, value in vars(told).items() if name != "output"}
    command = shlex.join(["python", "benchmarks/elastic.py", "pipelines", *sys.argv[1:]])
    about = {"command": command, "hardware": description(), "load": [before, os.getloadavg()], "settings": settings}
    told.output.write_text(json.dumps({**about, **rows}, indent=1) + "\n")
