"""Training with islands equals plain torch: a model and an optimizer per island, its devices' batches together, and
the mixing written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import AllReduce, Auto, FullyShard, Int8, Island, Plain
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.shared.wire.fsdp import full_tensor, is_sharded
from tests.gossip.test_resume import SaveOwn, fit
from tests.tiny import QUIET, Net, Record, SizedBatches, cut_small_models, in_processes, recorded

STEPS = 5
FOUR: list[tuple[int, Island]] = [(4, AllReduce(2)), (4, FullyShard(2))]
EIGHT: list[tuple[int, Island]] = [(8, AllReduce(4)), (8, FullyShard(4))]


class Blocks(Net):
    """With blocks that FSDP gathers one by one, and LayerNorm: the bias before a BatchNorm has no gradient but
    rounding, which Adam makes steps of."""

    def __init__(self, **net: Any) -> None:
        super().__init__(**net)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return super().forward(x)


class OfRank(SizedBatches):
    """The batches of one rank, in any process."""

    def __init__(self, length: int, rank: int) -> None:
        super().__init__(length)
        self._of = rank

    @property
    def _rank(self) -> int:
        return self._of


class Trains:
    """One island in plain torch."""

    def __init__(self, ranks: range, double: bool, accumulated: int, clip: float | None, optimizer: str) -> None:
        self.net = Blocks(optimizer=optimizer, dropout=0.0).to(torch.float64 if double else torch.float32)
        self._batches = [iter(OfRank(99, rank)) for rank in ranks]
        self._optimizer = self.net.configure_optimizers()
        self._double, self._accumulated, self._clip = double, accumulated, clip

    def step(self) -> None:
        self._optimizer.zero_grad()
        parts = len(self._batches) * self._accumulated
        for batches in self._batches:
            for _ in range(self._accumulated):
                x, y = next(batches)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self._double):
                    scores = self.net(x.double() if self._double else x)
                    loss = nn.functional.cross_entropy(scores if self._double else scores.float(), y)
                (loss / parts).backward()
        if self._clip:
            nn.utils.clip_grad_norm_(self.net.parameters(), self._clip)
        self._optimizer.step()

    @property
    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def put(self, flat: Tensor) -> None:
        nn.utils.vector_to_parameters(flat.clone(), self.net.parameters())


def reference(
    size: int,
    devices: int,
    double: bool = True,
    accumulated: int = 1,
    clip: float | None = None,
    optimizer: str = "adamw",
) -> Tensor:
    """[steps, islands, dim] of x(t+1) = x(t) + u(t) + (W - I) x_sent, launched after the update before."""
    settings = double, accumulated, clip, optimizer
    islands = [Trains(range(i * devices, (i + 1) * devices), *settings) for i in range(size // devices)]
    sent: Tensor | None = None
    rows = []
    for step in range(STEPS):
        for island in islands:
            island.step()
        x = torch.stack([island.flat for island in islands])
        if sent is not None:
            matrix = torch.from_numpy(mixing_matrix(Auto(), len(islands), step - 1)).to(x.dtype)
            x = x + (matrix @ sent - sent)
        for island, row in zip(islands, x, strict=True):
            island.put(row)
        sent = x
        rows.append(x.double())
    return torch.stack(rows)


class Double(Blocks):
    """The loss in float64."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


def train(folder: Path, size: int, island: Island, trainer_options: dict[str, Any], optimizer: str) -> None:
    net = Double if trainer_options.get("precision") == "64-true" else Blocks
    settings = {**QUIET, "max_steps": STEPS, **trainer_options}
    strategy = GossipStrategy(start_method="fork", island=island)
    Trainer(**settings, devices=size, strategy=strategy, callbacks=[Record(folder)]).fit(
        net(optimizer=optimizer, dropout=0.0), SizedBatches(99)
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "AdamW": ({"precision": "64-true"}, {}, 1e-7),
    "clipped": ({"precision": "64-true", "gradient_clip_val": 0.05}, {"clip": 0.05}, 1e-7),
    "accumulated": ({"precision": "64-true", "accumulate_grad_batches": 3}, {"accumulated": 3}, 1e-7),
    "Muon, clipped, accumulated": (
        {"precision": "64-true", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        {"clip": 0.05, "accumulated": 2, "optimizer": "muon"},
        1e-7,
    ),
    "bf16": ({"precision": "bf16-mixed", "gradient_clip_val": 0.05}, {"double": False, "clip": 0.05}, 2e-3),
}


# With eight processes only what has a sum over the island of its own: clipping. Replicas are each whole, so that what
# an optimizer does to shards is no matter of theirs.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "island", "case"),
    [
        *((*FOUR[1], case) for case in CASES),
        *((*FOUR[0], case) for case in ("clipped", "accumulated", "bf16")),
        *((*eight, "clipped") for eight in EIGHT),
    ],
    ids=str,
)
def test_training_equals_one_worker_per_island_in_plain_torch(
    tmp_path: Path, size: int, island: Island, case: str
) -> None:
    trainer_options, plain, tolerance = CASES[case]
    in_processes(train, tmp_path, size, island, trainer_options, plain.get("optimizer", "adamw"), seconds=100)
    expected = reference(size, island.devices, **plain).repeat_interleave(island.devices, dim=1)
    measured = recorded(tmp_path, size)[plain.get("accumulated", 1) - 1 :: plain.get("accumulated", 1)]
    torch.testing.assert_close(measured, expected, rtol=tolerance, atol=tolerance)
    assert (expected[-1, 0] - expected[-1, -1]).norm() > 10 * tolerance, "the islands were never apart"


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "island"), FOUR, ids=str)
def test_training_with_a_short_last_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, island: Island
) -> None:
    """As of models larger than these: its parts, too, are those of the devices."""
    cut_small_models(monkeypatch)
    test_training_equals_one_worker_per_island_in_plain_torch(tmp_path, size, island, "AdamW")


# ---- evaluation, consensus, bytes -----------------------------------------------------------------------------------


class Look(Callback):
    """What each device sees in its last round and in validation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: dict[str, Any] = {}

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen["during"] = whole(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["type"] = type(pl_module).__name__

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.setdefault("after", []).append(whole(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        apart = strategy.consensus()
        self.seen["consensus"] = (apart.absolute, apart.relative)
        strategy.progress_state()  # waits until all that was launched has left and landed
        self.seen["bytes"] = strategy.traffic().bytes_sent
        self.seen["elements"] = sum(b.flat.numel() for b in strategy.buckets)
        self.seen["sampler"] = strategy.distributed_sampler_kwargs
        self.seen["summary"] = strategy.summary()
        self.seen.setdefault("before", []).append(whole(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(self.seen, self._folder / f"seen-{trainer.global_rank}.pt")


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Every trained parameter of this device's island; collective inside it."""
    return {name: full_tensor(p).clone() for name, p in module.named_parameters() if p.requires_grad}


def watch(folder: Path, size: int, island: Island, evaluate: str) -> dict[str, Tensor]:
    strategy = GossipStrategy(start_method="fork", island=island, evaluate=evaluate)
    settings = {**QUIET, "max_steps": STEPS, "val_check_interval": 3, "precision": "64-true"}
    module = Double(optimizer="adamw", dropout=0.0)
    trainer = Trainer(**settings, devices=size, strategy=strategy, callbacks=[Look(folder)])
    trainer.fit(module, SizedBatches(6), SizedBatches(2))
    assert type(module) is Double
    return module.state_dict()


def test_gradients_may_travel_in_codes_inside_an_island(tmp_path: Path) -> None:
    """Its devices stay equal bit for bit, and near those of the exact average."""
    found = {}
    for codec in (Plain(), Int8()):
        folder = tmp_path / str(codec)
        folder.mkdir()
        in_processes(train, folder, 4, AllReduce(2, codec=codec), {"precision": "64-true"}, "adamw")
        x = found[codec] = recorded(folder, 4)
        assert torch.equal(x[:, 0], x[:, 1])
        assert torch.equal(x[:, 2], x[:, 3])
        assert not torch.equal(x[:, 0], x[:, 2])
    apart = (found[Int8()][-1] - found[Plain()][-1]).norm()
    assert 0 < apart < 0.5 * (found[Plain()][-1] - found[Plain()][0]).norm()


@pytest.mark.sampled
@pytest.mark.parametrize("evaluate", ["mean", "own"])
@pytest.mark.parametrize("island", [AllReduce(2), FullyShard(2)], ids=str)
def test_evaluation_consensus_and_bytes_are_those_of_islands(tmp_path: Path, island: Island, evaluate: str) -> None:
    size = 4
    handed_back = in_processes(watch, tmp_path, size, island, evaluate, seconds=100)
    seen = [torch.load(tmp_path / f"seen-{rank}.pt") for rank in range(size)]
    for row in seen:  # validation after the third step leaves no trace
        assert all(torch.equal(v, row["after"][3][k]) for k, v in row["before"][2].items())
    first, last = seen[0]["before"], seen[2]["before"]
    mean = {k: (v + last[2][k]) / 2 for k, v in first[2].items()}
    for row in seen:
        expected = mean if evaluate == "mean" else row["before"][2]
        torch.testing.assert_close(row["during"], expected, rtol=1e-9, atol=1e-9)
    apart = sum((v - last[-1][k]).square().sum() / 4 for k, v in first[-1].items()).sqrt()
    norm = sum(((v + last[-1][k]) / 2).square().sum() for k, v in first[-1].items()).sqrt()
    for row in seen:
        assert row["consensus"] == pytest.approx((float(apart), float(apart / norm)), rel=1e-9)
        # One peer hears this device's part in each of the rounds, behind a header of three numbers.
        part = row["elements"] // (2 if isinstance(island, AllReduce) else 1)
        assert row["bytes"] == STEPS * (8 * part + 24)
        assert row["summary"]["workers"] == f"2 islands, each {island!r}"
    assert [row["sampler"] for row in seen] == [{"num_replicas": 4, "rank": rank} for rank in range(4)]
    for name, value in {k: (v + last[-1][k]) / 2 for k, v in first[-1].items()}.items():
        if evaluate == "mean":  # the last messages have landed since
            assert handed_back[name].shape == value.shape
            torch.testing.assert_close(handed_back[name], value.float())  # the caller's module is in float32


# ---- checkpoints ----------------------------------------------------------------------------------------------------

RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "AdamW, scheduler, mid-epoch": ({"optimizer": "adamw", "scheduler": True}, {}, 4),
    "momentum, accumulated": ({}, {"accumulate_grad_batches": 2}, 2),
    "Muon": ({"optimizer": "muon"}, {"gradient_clip_val": 0.1}, 4),
    "bf16, clipped": ({"optimizer": "adamw"}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}, 4),
}


# A device of AllReduce saves what a worker without an island does (tests/gossip/test_resume.py); one of FullyShard its
# own part of what the optimizer has, clips over the island, and has Lightning's FSDP for its precision.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "island"),
    [
        ("momentum, accumulated", AllReduce(2)),
        ("Muon", AllReduce(2)),
        ("AdamW, scheduler, mid-epoch", FullyShard(2)),
        ("Muon", FullyShard(2)),
        ("bf16, clipped", FullyShard(2)),
    ],
    ids=str,
)
def test_resume_is_bit_equal_to_the_uninterrupted_run(tmp_path: Path, island: Island, case: str) -> None:
    net, trainer_options, at = RESUMES[case]
    whole, part = tmp_path / "whole", tmp_path / "part"
    options = {"island": island}
    in_processes(fit, whole, 4, 9, options, net, trainer_options, at, None, False, seconds=100)
    path = whole / f"at-step={at}.ckpt"
    in_processes(fit, part, 4, 9, options, net, trainer_options, None, path, False, seconds=100)
    for rank in range(4):
        expected, measured = (torch.load(f / f"own-{rank}.pt") for f in (whole, part))
        assert {k: (expected[k] - measured[k]) for k in expected if not torch.equal(expected[k], measured[k])} == {}
    first, second = (torch.load(whole / f"own-{rank}.pt")["head.weight"] for rank in (0, 2))
    assert not torch.equal(first, second), "the islands were never apart: the test could not fail"


@pytest.mark.sampled
@pytest.mark.parametrize("island", [AllReduce(2), FullyShard(2)], ids=str)
def test_the_checkpoint_is_the_whole_mean_and_loads_without_this_package(tmp_path: Path, island: Island) -> None:
    handed_back = in_processes(fit, tmp_path, 4, 4, {"island": island}, {"optimizer": "adamw"}, {}, 4, None, False)
    path = tmp_path / "at-step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    own = [torch.load(tmp_path / f"own-{rank}.pt") for rank in range(4)]
    for key, _ in Net().named_parameters():
        value = checkpoint["state_dict"][key]
        rows = [o[key] for o in own]
        islands = [torch.cat([a, b]) if isinstance(island, FullyShard) else a for a, b in (rows[:2], rows[2:])]
        torch.testing.assert_close(value, torch.stack(islands).mean(0))
        torch.testing.assert_close(handed_back[key], value)
    plain = Net.load_from_checkpoint(path)
    torch.testing.assert_close(plain.state_dict(), checkpoint["state_dict"])
    assert len(list((tmp_path / ".workers" / "at-step=4").iterdir())) == 4


class Placing(GossipStrategy):
    """Writes down how often the model went to the device while a parameter of it was whole."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    def model_to_device(self) -> None:
        whole = any(not is_sharded(p) for p in self._module.parameters())
        with (self.folder / f"placed-{self.global_rank}").open("a") as file:
            file.write(f"{'whole' if whole else 'sharded'}\n")
        super().model_to_device()


def place(folder: Path, island: Island) -> str:
    strategy = Placing(folder, start_method="fork", island=island)
    trainer = Trainer(**{**QUIET, "max_steps": 1}, devices=2, strategy=strategy, callbacks=[SaveOwn(folder)])
    trainer.fit(Blocks(optimizer="adamw"), SizedBatches(2))
    return (folder / "placed-1").read_text()


def test_a_device_never_holds_the_whole_of_a_model_that_is_sharded(tmp_path: Path) -> None:
    """FSDP moves block by block what is still on the host."""
    sharded, equal = tmp_path / "sharded", tmp_path / "equal"
    sharded.mkdir()
    equal.mkdir()
    assert in_processes(place, sharded, FullyShard(2)) == "sharded\n"
    assert in_processes(place, equal, AllReduce(2)) == "whole\n"


def go_on(folder: Path, size: int, island: Island | None, path: Path) -> dict[str, Tensor]:
    folder.mkdir()
    module = Net(optimizer="adamw")
    strategy = GossipStrategy(start_method="fork", island=island)
    Trainer(**{**QUIET, "max_steps": 6}, devices=size, strategy=strategy, callbacks=[SaveOwn(folder)]).fit(
        module, SizedBatches(6), ckpt_path=path
    )
    return module.state_dict()


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after", "size"), [
    (FullyShard(2), FullyShard(4), 4),
    (FullyShard(2), None, 2),
    (None, FullyShard(2), 4),
    (AllReduce(2), AllReduce(4), 4),
    (AllReduce(2), FullyShard(2), 4),
], ids=str)  # fmt: skip
def test_resuming_with_other_islands_starts_from_the_mean_and_says_so(
    tmp_path: Path, before: Island | None, after: Island | None, size: int, capfd: Any
) -> None:
    in_processes(fit, tmp_path / "whole", 4, 4, {"island": before}, {"optimizer": "adamw"}, {}, 4, None, False)
    in_processes(go_on, tmp_path / "part", size, after, tmp_path / "whole" / "at-step=4.ckpt", seconds=100)
    said = capfd.readouterr().err
    assert "all workers start from the mean" in said
    assert f"saved by {'4 workers' if size != 4 else 'Solo' if before is None else type(before).__name__}" in said
