"""One stage of a pipeline of two as a process of a benchmark: what it runs in turns, and what autograd holds on it."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from common.hardware import machine_seconds
from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, Schedule
from lightning_decentral.pipeline.compute.causal.causal_model import CausalModel
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.plan.schedule import Kind
from lightning_decentral.pipeline.wire.executor import Edge
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.wire.transport import GlooTransport

STAGES, HEAD = 2, 64
QUIET = 0.1  # of a core: what other work may take
LOOK_SECONDS, PATIENCE_SECONDS, AGAIN = 0.3, 240.0, 4
T = TypeVar("T")
Step = Callable[[], None]
Taken = dict[str, Any]
"""seconds; own: processor seconds of this thread; others: those of other work on the machine; actions: own, of each."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of the sequences it learns from."""

    width: int
    blocks: int
    length_tokens: int

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        """Add the options of a size to the command line."""
        parser.add_argument("--width", type=int, default=512, help="of the residual stream, a multiple of 64")
        parser.add_argument("--blocks", type=int, default=4, help="of the whole model, a multiple of 2")
        parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")

    @classmethod
    def of(cls, options: Namespace) -> "Size":
        """Read the size from the parsed options."""
        return cls(options.width, options.blocks, options.length)

    def model(self) -> GPT2LMHeadModel:
        """GPT-2 over bytes, the same at each call."""
        torch.manual_seed(0)
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": self.width, "n_layer": self.blocks, "n_head": self.width // HEAD}
        tokens = {"vocab_size": 256, "n_positions": self.length_tokens, "bos_token_id": None, "eos_token_id": None}
        return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, **dropout))


def token_mean(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Bench:
    """One of the two processes.

    Args:
        patience: seconds to wait for a machine that does nothing else; 0: nothing is waited for or done again.
    """

    def __init__(self, rank: int, size: Size, patience: float = PATIENCE_SECONDS) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=STAGES)
        self.patience = patience
        self.over = GlooTransport(dist.new_group())
        self.rank, self.length = rank, size.length_tokens
        self.own_seconds: dict[str, float] = {}
        self.dropped = 0
        """Times that something was done again, as other work had disturbed it."""
        self.alone_model = size.model()
        half = size.blocks // STAGES
        self.place = StagePlace(rank * half, (rank + 1) * half, rank == 0, rank == STAGES - 1)
        self.model = adapted(size.model())
        self.model.keep(self.place)

    def ids(self, batch: int) -> Tensor:
        return torch.randint(0, 256, (batch, self.length), generator=torch.Generator().manual_seed(batch))

    def pipe(self, schedule: Schedule) -> StageRunner:
        options = {"activations": Keep(), "boundary": ExactActivations(), "device": torch.device("cpu")}
        edges = {(kind, 1 - self.rank): Edge(self.over, 1 - self.rank) for kind in Kind}
        return StageRunner(self.model, self.place, self.over, edges, schedule=schedule, **options)

    def sliced(self, batch: int, slices: list[int], microbatches: int = 1) -> Step:
        calls = [Call(part) for part in self.ids(batch).tensor_split(microbatches)]
        pipe = self.pipe(OneForwardOneBackward())
        share = 1 / microbatches

        def step() -> None:
            executor = pipe.train(calls, slices, lambda m, logits: share * token_mean(logits, calls[m].inputs))
            self.own_seconds = {str(action): seconds for action, seconds in executor.own_seconds.items()}

        return step

    def alone(self, batch: int, workers: int = 1) -> Step:
        """The whole model on this many workers at once, each for itself."""
        ids = self.ids(batch)

        def step() -> None:
            if self.rank < workers:
                token_mean(self.alone_model(input_ids=ids).logits, ids).backward()

        return step

    def torch_pipelining(self, kind: Any, batch: int) -> Step:
        ids = self.ids(batch)
        stage = PipelineStage(_Half(self.model, self.place), self.rank, STAGES, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=batch, loss_fn=token_mean)

        def step() -> None:
            if self.rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids, losses=[])

        return step

    def turns(self, steps: dict[str, Step], count: int) -> list[dict[str, Taken]]:
        """Return the times of so many turns; each step of one comes after one like it."""
        return [self.turn(steps) for _ in range(count)]

    def turn(self, steps: dict[str, Step]) -> dict[str, Taken]:
        """One step of each."""
        return {name: self.undisturbed(lambda step=step: self.taken(step))[0] for name, step in steps.items()}  # type: ignore[misc]

    def undisturbed(self, work: Callable[[], T]) -> tuple[T, float]:
        """(what it came to, share of a core that other work took meanwhile): done again where that is much.

        It begins when the machine does nothing else, or when patience is at an end. Collective.
        """
        for last in [False] * (AGAIN if self.patience else 0) + [True]:
            self._calm()
            begin, process, machine = time.perf_counter(), time.process_time(), machine_seconds()
            found = work()
            dist.barrier()
            machine, seconds = machine_seconds() - machine, time.perf_counter() - begin
            ours = torch.tensor([time.process_time() - process, machine / STAGES, seconds / STAGES])
            dist.all_reduce(ours)  # the same on both, so that both do it again
            share = max(0.0, float((ours[1] - ours[0]) / ours[2]))
            if share < QUIET or last:
                return found, share
            self.dropped += 1
        raise AssertionError

    def _calm(self) -> None:
        end = time.perf_counter() + self.patience
        while self.rank == 0 and time.perf_counter() < end:
            before = machine_seconds()
            time.sleep(LOOK_SECONDS)
            if machine_seconds() - before < QUIET * LOOK_SECONDS:
                break
        dist.barrier()

    def taken(self, step: Step) -> Taken:
        """Return a step's times after one like it, as in training: its memory is where that one left it."""
        step()
        self._forget()
        self.own_seconds = {}
        dist.barrier()
        begin, own, process, machine = time.perf_counter(), time.thread_time(), time.process_time(), machine_seconds()
        step()
        own = time.thread_time() - own
        dist.barrier()
        seconds, machine = time.perf_counter() - begin, machine_seconds() - machine
        ours = torch.tensor(time.process_time() - process, dtype=torch.float64)
        dist.all_reduce(ours)
        self._forget()
        others = max(0.0, machine - float(ours))
        return {"seconds": seconds, "own": own, "others": others, "actions": self.own_seconds}

    def _forget(self) -> None:
        """The gradients."""
        self.model.module.zero_grad()
        self.alone_model.zero_grad()


class _Half(nn.Module):
    """One stage for torch's own schedules, without slices."""

    def __init__(self, model: CausalModel, place: StagePlace) -> None:
        super().__init__()
        self.module, self._model, self._place = model.module, model, place

    def forward(self, given: Tensor) -> Tensor:
        length = given.shape[1]
        ids = given if self._place.first else torch.zeros(given.shape[:2], dtype=torch.int64)
        hidden = None if self._place.first else given
        return self._model.forward(self._place, Call(ids), hidden, KVCache(length), 0, length)


def saved_bytes(bench: Bench, schedule: Any, microbatches: int, slices: list[int]) -> int:
    """The most bytes that autograd holds at once on this stage, each storage once, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in bench.model.module.parameters()}
    held: dict[int, int] = {}
    counts: dict[int, int] = {}
    most = 0

    class Token:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in parameters:
                held[self.key] = tensor.untyped_storage().nbytes()
                counts[self.key] = counts.get(self.key, 0) + 1

        def __del__(self) -> None:
            if self.key in counts:
                counts[self.key] -= 1
                if counts[self.key] == 0:
                    del counts[self.key], held[self.key]

    def pack(tensor: Tensor) -> Token:
        nonlocal most
        token = Token(tensor)
        most = max(most, sum(held.values()))
        return token

    calls = [Call(part) for part in bench.ids(microbatches).tensor_split(microbatches)]
    pipe = bench.pipe(schedule)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
        pipe.train(calls, slices, lambda m, logits: token_mean(logits, calls[m].inputs))
    return most
