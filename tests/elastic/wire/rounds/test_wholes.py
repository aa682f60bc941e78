"""Whole tensors of shards against plain ones: rows there and back, and buckets as those of an unsharded model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.elastic.wire.rounds.wholes import WholeBucket, Wholes
from lightning_decentral.gossip import FullyShard
from lightning_decentral.gossip.wire.optimizer_mixer import Written
from lightning_decentral.shared.compute.buckets import Bucket, BucketSpan, pack, with_tail
from lightning_decentral.shared.wire.fsdp import full_tensor, local
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.tiny import QUIET, Net, SizedBatches, cut_small_models, in_processes
from tests.world import world

SHAPES = [(5, 3), (1, 7), (8, 2, 2), (4,), (3,), (1,)]


def drawn(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


@pytest.mark.threads
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_rows_are_gathered_and_scattered(size: int, dtype: torch.dtype) -> None:
    def worker(group: Any) -> tuple[list[Tensor], list[Tensor]]:
        wholes = Wholes(GlooTransport(group), torch.device("cpu"))
        shards = [rows(whole, size, group.rank()) for whole in drawn(dtype)]
        found = [wholes.room(whole.numel(), dtype).view(whole.shape) for whole in drawn(dtype)]
        wholes.gather(shards, found)
        gathered = [whole.clone() for whole in found]
        for whole in found:
            whole.mul_(2)
        wholes.scatter(found, shards)
        return gathered, shards

    (first, _), *others = both = world(size, worker)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(dtype), strict=True))
    assert all(whole.is_meta for gathered, _ in others for whole in gathered)
    for k, whole in enumerate(drawn(dtype)):
        assert torch.equal(torch.cat([shards[k] for _, shards in both]), 2 * whole)


def rows(whole: Tensor, devices: int, place: int) -> Tensor:
    chunks = whole.chunk(devices)
    return chunks[place].clone() if place < len(chunks) else whole[:0].clone()


class Packed(Callback):
    """Compares buckets of whole parameters with those of the module before it was sharded, and adds one to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain = Net(dropout=0.0)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        wholes = Wholes(strategy.wire.world, torch.device("cpu"))
        self._plain.load_state_dict({n: full_tensor(t) for n, t in pl_module.state_dict().items()})
        made = pack(list(pl_module.parameters()), 400, partial(WholeBucket, wholes=wholes))
        mixed, expected = with_tail(made), with_tail(pack(list(self._plain.parameters()), 400))
        same = [looks(a) == looks(b) for a, b in zip(mixed, expected, strict=True)]
        if trainer.global_rank == 0:
            same += [torch.equal(a.flat, b.flat) for a, b in zip(mixed, expected, strict=True)]
        before = [full_tensor(parameter) for parameter in pl_module.parameters()]
        for bucket in made:
            bucket.flat.add_(1)
            bucket.store()
        after = [full_tensor(parameter) for parameter in pl_module.parameters()]
        same += [torch.equal(a, b + 1) for a, b in zip(after, before, strict=True)]
        written = Written(made)
        written.note()
        same.append(written.look() == set())
        first, second, *_ = pl_module.parameters()
        local(first).data.add_(1)
        with torch.no_grad():
            second.add_(1)
        same.append(written.look() == {local(p).data_ptr() for p in (first, second)})
        torch.save(same, self._folder / f"{trainer.global_rank}.pt")


def looks(bucket: Bucket | BucketSpan) -> Any:
    return bucket.flat.numel(), bucket.flat.dtype


def fit(folder: Path) -> None:
    strategy = GossipStrategy(start_method="fork", island=FullyShard(2))
    trainer = Trainer(**QUIET, devices=2, strategy=strategy, max_steps=1, callbacks=[Packed(folder)])
    trainer.fit(Net(dropout=0.0), SizedBatches(1))


def test_buckets_are_those_of_a_model_that_is_not_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_models(monkeypatch)
    in_processes(fit, tmp_path)
    for rank in range(2):
        same: Sequence[bool] = torch.load(tmp_path / f"{rank}.pt")
        assert len(same) > len(list(Net().parameters()))
        assert all(same)
