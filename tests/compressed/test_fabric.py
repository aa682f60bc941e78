"""Under Fabric, too: with `Plain()` it is ddp, replicas stay equal, and what was rounded away is resumed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn

from lightning_decentral.compressed import FabricCompressedStrategy
from lightning_decentral.gossip import DifferenceCompression, Int8, Plain
from tests.loops import Loop, equal, run
from tests.partial.towers import Network

LOOP = {"norm": True, "optimizer": partial(torch.optim.SGD, momentum=0.9), "accumulate": 3, "clip": 0.5}


def compressed(**options: Any) -> FabricCompressedStrategy:
    return FabricCompressedStrategy(start_method="fork", **options)


def sent(fabric: Fabric, model: nn.Module) -> int:
    return fabric.strategy.sent_bytes


def test_plain_is_ddp(tmp_path: Path) -> None:
    ours = run(tmp_path, compressed(codec=Plain()), Loop(**LOOP, look=sent))
    ddp = run(tmp_path, DDPStrategy(start_method="fork"), Loop(**LOOP), name="ddp")
    # Buffers: ddp hands them out before a forward, we after the step; worker 0's are the same.
    for mine, other in zip(ours[0]["rows"], ddp[0]["rows"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    first, second, *_ = ours[0]["seen"]
    bytes_of_gradients = 4 * sum(p.numel() for p in Network(tied=True, norm=True).parameters())
    assert first == second - first == round(2 * (3 - 1) / 3 * bytes_of_gradients), "once for three backwards"


def test_replicas_stay_equal_and_what_was_rounded_away_is_resumed(tmp_path: Path) -> None:
    whole = run(tmp_path, compressed(bucket_bytes=600), Loop(**LOOP, save_at=3))
    file = tmp_path / "loop" / "step.ckpt"
    rest = run(tmp_path, compressed(bucket_bytes=600), Loop(**LOOP, resume=file), name="rest")
    assert all(equal(worker["rows"], whole[0]["rows"]) for worker in whole)
    assert not equal(whole[0]["rows"][:1], whole[0]["rows"][1:2])
    assert all(equal(a["rows"][3:], b["rows"]) for a, b in zip(whole, rest, strict=True))


def test_a_step_with_nan_ends_all_or_is_skipped_by_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="FloatingPointError: the gradients hold NaN or infinity on all workers"):
        run(tmp_path, compressed(), Loop(sick_at=2))
    loop = Loop(sick_at=2, optimizer=torch.optim.AdamW)
    rows = [worker["rows"] for worker in run(tmp_path, compressed(nonfinite="skip"), loop, name="skipped")]
    assert all(equal(row, rows[0]) for row in rows)
    assert equal(rows[0][1:2], rows[0][2:3])
    assert not equal(rows[0][2:3], rows[0][3:4])
    assert all(bool(torch.isfinite(value).all()) for value in rows[0][-1].values())


LINE_SEARCH = partial(torch.optim.LBFGS, max_iter=8, line_search_fn="strong_wolfe")


def test_lbfgs_gets_the_mean_loss(tmp_path: Path) -> None:
    """By losses of their own the workers would end after other numbers of backwards, and wait for each other."""
    rows = [worker["rows"] for worker in run(tmp_path, compressed(), Loop(optimizer=LINE_SEARCH))]
    assert all(equal(row, rows[0]) for row in rows)


def test_codecs_of_differences_are_refused() -> None:
    with pytest.raises(ValueError, match="DifferenceCompression"):
        compressed(codec=DifferenceCompression(Int8()))
