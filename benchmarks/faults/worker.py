"""One worker of a run that is to be disturbed: a tiny model, what is done to it, and the record that it leaves."""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.pipeline import Given
from lightning_decentral.shared.errors import mendable

PACKAGE = "lightning_decentral"
EPOCHS, BATCHES = 3, 4
TIMEOUT_SECONDS = 10.0  # what the runs are configured to wait for each other
LENGTH, VOCABULARY = 8, 31


class Classifier(LightningModule):
    """A network with BatchNorm, in float32."""

    def __init__(self, width: int = 8, learning_rate: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.first, self.norm, self.head = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.norm(self.first(x)).relu()).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=self.momentum)


class Language(Classifier):
    """A causal model of two blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(0)
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
        del self.first, self.norm, self.head
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet))

    def loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Batches:
    """Batches that depend on (worker, epoch, index) alone."""

    def __init__(
        self, make: Callable[[torch.Generator], list[Tensor]], rank: int, length: int, epoch: Callable[[], int]
    ) -> None:
        self._make, self._rank, self._length, self._epoch = make, rank, length, epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(self._length):
            yield self._make(torch.Generator().manual_seed(10_000 * self._rank + 100 * self._epoch() + index))


def images(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]


def tokens(generator: torch.Generator) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)]


@dataclass(frozen=True)
class Method:
    """A strategy of the package and what it trains here."""

    strategy: type[Any]
    module: type[Classifier] = Classifier
    batch: Callable[[torch.Generator], list[Tensor]] = images
    options: dict[str, Any] = field(default_factory=dict)
    same_batches: bool = False


METHODS = {
    "gossip": Method(GossipStrategy),
    "compressed": Method(CompressedStrategy),
    "partial_backprop": Method(PartialBackpropStrategy, options={"cuts": ["head"]}),
    "token_pipeline": Method(TokenPipelineStrategy, Language, tokens, {"slicing": Given((5, 3))}, same_batches=True),
}


@dataclass
class Worker:
    """Arguments of one worker, which a fault changes before it begins.

    Args:
        folder: the run's own, for checkpoints.
        strategy: arguments of the strategy's constructor; trainer: of the Trainer's; module: of the module's.
        lengths: batches of training and validation.
    """

    method: str
    rank: int
    size: int
    folder: Path
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    lengths: tuple[int, int] = (BATCHES, 2)
    resume: str | None = None
    make: Callable[["Worker"], LightningModule] | None = None

    def train(self) -> None:
        kind = METHODS[self.method]
        options = {"timeout": timedelta(seconds=TIMEOUT_SECONDS), "process_group_backend": "gloo"}
        strategy = kind.strategy(**{**kind.options, **options, **self.strategy})
        saving = ModelCheckpoint(self.folder, filename="epoch-{epoch}", save_last=True, save_top_k=1)
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "devices": self.size,
            "max_epochs": EPOCHS,
        }
        module = (self.make or (lambda worker: METHODS[worker.method].module(**worker.module)))(self)
        trainer = Trainer(**{**quiet, **self.trainer}, strategy=strategy, callbacks=[*self.callbacks, saving])
        source = 0 if kind.same_batches else self.rank
        loaders = [Batches(kind.batch, source, length, lambda: trainer.current_epoch) for length in self.lengths]
        trainer.fit(module, *loaders, ckpt_path=self.resume)
        if kind.same_batches:  # a stage has its own blocks only; the checkpoint has all
            return
        torch.save(module.state_dict(), self.folder / f"handed-back-{self.rank}.pt")


Fault = Callable[[Worker], None]


def meeting(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables by which a worker that somebody else started finds the others."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return {**place, "NODE_RANK": "0", "LOCAL_RANK": str(rank)}


def lead(work: Callable[[], None], record: Path, output: Path, variables: dict[str, str]) -> None:
    """The life of a forked process from its start to its record."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.update(variables)
    status, said = 0, {"kind": "finished"}
    try:
        work()
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        traceback.print_exc()
        status, said = 1, record_of(error)
    record.write_text(json.dumps({**said, "at": time.time()}))
    os._exit(status)


def record_of(error: BaseException) -> dict[str, Any]:
    """Type, text, and whether its text was meant for a user: raised by a line of the package, or mendable."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and f"/{PACKAGE}/" in frames[-1].filename and (frames[-1].line or "").startswith("raise")
    meant = own or mendable(error) or isinstance(error, (KeyboardInterrupt, SystemExit))
    return {"kind": "raised", "type": type(error).__name__, "text": str(error), "meant": meant}
