"""One worker of the first hour: a small GPT under a strategy, with validation, a checkpoint and a run that goes on.

`first_hour_runs` starts `gpu.py first_hour_worker gossip cuda gloo FOLDER` and sets who it is.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import AllReduce, FullyShard, Int8
from lightning_decentral.pipeline import Uniform
from lightning_decentral.spilled import OnDevice, OnHost

SMALL = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 50, "n_positions": 32}


class Text(LightningModule):
    """`transformers.GPT2LMHeadModel` on tokens drawn at random."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        nothing = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
        without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(**config, **nothing, **without))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(config: dict[str, int], size: int, count: int) -> DataLoader:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(config["vocab_size"], (size * count, config["n_positions"] + 1), generator=random)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=size)


class KillOne(Callback):
    """Rank 1 is gone in its sixth step."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 6:
            (Path(trainer.default_root_dir) / "killed").write_text(str(time.time()))
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(case: str, device: str, backend: str, folder: str, steps: int, extra: dict[str, object]) -> Trainer:
    ddp = {"process_group_backend": backend, "timeout": timedelta(seconds=60)}
    strategies = {
        "gossip": lambda: GossipStrategy(**ddp),
        "int8": lambda: GossipStrategy(codec=Int8(), **ddp),
        "compressed": lambda: CompressedStrategy(codec=Int8(), **ddp),
        "allreduce": lambda: GossipStrategy(island=AllReduce(2), **ddp),
        "fully_shard": lambda: GossipStrategy(island=FullyShard(2), **ddp),
        "partial_backprop": lambda: PartialBackpropStrategy(**ddp),
        "token_pipeline": lambda: TokenPipelineStrategy(stages=2, slicing=Uniform(4), microbatches=2, **ddp),
    }
    options: dict[str, object] = {
        "accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "num_nodes": int(os.environ["WORKERS"]),
        "strategy": strategies[case](), "precision": "bf16-mixed" if device == "cuda" else "32-true",
        "max_steps": steps, "limit_val_batches": 2, "val_check_interval": 3, "default_root_dir": folder,
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**options, **extra})


def main() -> None:
    case, device, backend, folder = sys.argv[1:5]
    torch.set_num_threads(1)
    if os.environ["KILL"] == "1":
        killed(case, device, backend, folder)
    seed_everything(1, verbose=False)
    loader = batches(SMALL, 4, 16)
    first = trainer_of(case, device, backend, folder, 6, {})
    first.fit(Text(**SMALL), loader, loader)
    path = os.path.join(folder, "six.ckpt")
    first.save_checkpoint(path)
    again = trainer_of(case, device, backend, folder, 9, {})
    again.fit(Text(**SMALL), loader, loader, ckpt_path=path)
    losses = [float(trainer.callback_metrics["train/loss"]) for trainer in (first, again)]
    assert again.global_step == 9, again.global_step
    assert all(loss == loss and loss < 10 for loss in losses), losses
    print(f"ok: loss {losses[0]:.3f} after 6 steps, {losses[1]:.3f} after 9", flush=True)
    os._exit(0)


def killed(case: str, device: str, backend: str, folder: str) -> None:
    """Rank 0 reports how long after the kill it ended, and by what error."""
    loader = batches(SMALL, 4, 400)
    trainer = trainer_of(case, device, backend, folder, 400, {"callbacks": [KillOne()], "limit_val_batches": 0})

    def watch() -> None:
        # Where only the end of the process frees it: 50 s are too long for any of the promised ends.
        time.sleep(50)
        print("not ended 50 s after the start", flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        trainer.fit(Text(**SMALL), loader)
    except BaseException as error:
        seconds = time.time() - float((Path(folder) / "killed").read_text())
        print(f"ended after {seconds:.1f} s: {str(error).splitlines()[0][:160]}", flush=True)
        os._exit(0)


def spilled_step(device: torch.device, update: str) -> tuple[float, int, int, int]:
    """(seconds of the last step, peak bytes, parameters, bytes it may use)"""
    on_device = device.type == "cuda"
    config = {**SMALL, "n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 8192, "n_positions": 512}
    config = config if on_device else SMALL
    limit = 12 << 30 if on_device else 64 << 20
    builds = {
        "plain": lambda: "auto",
        "on the host": lambda: SpilledStrategy(memory_bytes=limit, update=OnHost()),
        "on the device": lambda: SpilledStrategy(memory_bytes=limit, update=OnDevice()),
    }
    stamps: list[float] = []

    class Clock(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            if on_device:
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

    with device:  # a host would draw 1.2e9 numbers for half a minute
        module = Text(**config)
    module.cpu()
    if on_device:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(
        accelerator="gpu" if on_device else "cpu", devices=1, strategy=builds[update](), max_steps=4,
        precision="bf16-mixed" if on_device else "32-true", limit_val_batches=0, logger=False, callbacks=[Clock()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches(config, 4, 4))
    peak = torch.cuda.max_memory_allocated() if on_device else 0
    return stamps[-1] - stamps[-2], peak, sum(p.numel() for p in module.parameters()), limit


def rehearsed(config: dict[str, int], device: str, steps: int) -> tuple[list[float], float]:
    """([loss of each method in the end], seconds of it all) of four workers."""
    from common import from_checkout  # noqa: F401  # overrides of methods are composed from conf
    from lightning_decentral.planner.rehearsal import rehearse

    methods = ("strategy=compressed", "strategy=gossip strategy/codec=int8")  # and ddp
    seed_everything(1, verbose=False)
    began = time.perf_counter()
    answer = rehearse(
        Text(**config), batches(config, 4, 4 * steps), workers=[4], target=0.0, methods=methods, steps=steps,
        rates=[1.0], seeds=1, validation=batches(config, 4, 2), threads=1, device=device,
    )  # fmt: skip
    assert not answer.refused, answer.refused
    return [row.loss for row in sorted(answer.rows, key=lambda row: row.overrides)], time.perf_counter() - began
