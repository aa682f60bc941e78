"""What works under `ddp` keeps working under partial backprop, replicas equal bit for bit; wrong uses are refused."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_decentral
from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import (
    BlockCoordinate,
    Cyclic,
    Decay,
    Forget,
    Full,
    Lisa,
    PerWorker,
    Random,
    Skip,
    Staircase,
    Temporal,
)
from tests.partial.towers import Batches, Network, Scripted, Tower, Watch, batch_of, fit, run
from tests.tiny import QUIET, in_processes

STEPS = 20
MODES = [
    Full(),
    Staircase(),
    Temporal(warm_up=0),
    Temporal(order=Cyclic(fractions=None), warm_up=0),
    Temporal(order=Random(seed=3), warm_up=5),
    PerWorker(fractions=(0.5, 1.0, 0.25)),
    Lisa(every=2, blocks=1),
    BlockCoordinate(every=2),
]


def assert_equal(rows: list[dict[str, Any]], steps: int | None = None) -> None:
    """All workers have the same bits after every step, buffers included."""
    for row in rows:
        assert len(row["parameters"]) == (steps or len(row["parameters"])) > 0
        for mine, first in zip(row["parameters"], rows[0]["parameters"], strict=True):
            for name, value in first.items():
                assert torch.equal(mine[name], value), name


def assert_close(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    for mine, other in zip(a, b, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["", "_spawn", "_fork", "_notebook"])
def test_names_are_registered(name: str) -> None:
    lightning_decentral._register()
    trainer = Trainer(**QUIET, devices=2, strategy=f"partial_backprop{name}")
    assert isinstance(trainer.strategy, PartialBackpropStrategy)
    assert trainer.strategy._start_method == {"": "popen", "_spawn": "spawn"}.get(name, "fork")
    assert trainer.strategy.depth == Temporal(), "the default"


# ---- replicas --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_replicas_are_equal_after_every_step_in_every_mode(tmp_path: Path, mode: Any) -> None:
    module = Tower(tied=True, norm=True, optimizer="adamw", schedule=True)
    settings = {"max_steps": STEPS, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    rows = run(tmp_path, module, options={"depth": mode}, size=3, batches=Batches(50), **settings)
    assert_equal(rows, STEPS)
    first, last = rows[0]["parameters"][0], rows[0]["parameters"][-1]
    assert all(not torch.equal(first[name], last[name]) for name in first), "everything was trained"


def test_muon_passes_over_what_nobody_trained(tmp_path: Path) -> None:
    """Below the cuts neither decay nor momentum; all workers orthogonalize the same means."""
    rows = run(tmp_path, Tower(tied=True, norm=True, optimizer="muon"), options={"depth": Staircase()}, size=3)
    assert_equal(rows)


class Overflow(Tower):
    """Worker 1's loss overflows at the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 2 else loss


class Scale(Watch):
    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.more["scale"] = trainer.precision_plugin.scaler.get_scale()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [Temporal(warm_up=0), Staircase()], ids=str)
def test_a_loss_scaler_skips_the_same_step_on_all(tmp_path: Path, mode: Any) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
    module = Overflow(norm=True, optimizer="adamw")
    rows = run(tmp_path, module, options={"depth": mode}, size=3, plugins=[plugin], callbacks=[Scale(tmp_path)])
    assert_equal(rows, 4)
    assert [row["scale"] for row in rows] == [8.0] * 3
    second, third = rows[0]["parameters"][1:3]
    name = "network.head.bias"
    assert torch.equal(second[name], third[name]), "the step that overflowed"
    assert all(bool(torch.isfinite(v).all()) for v in rows[0]["parameters"][-1].values())


def test_a_step_with_infinite_gradients_is_skipped_by_all(tmp_path: Path) -> None:
    options = {"depth": Temporal(warm_up=0), "nonfinite": "skip"}
    rows = run(tmp_path, Overflow(optimizer="adamw"), options=options, size=3)
    assert_equal(rows, 4)
    second, third = rows[0]["parameters"][1:3]
    assert all(torch.equal(second[name], third[name]) for name in second)
    last = rows[0]["parameters"][-1]
    assert all(bool(torch.isfinite(v).all()) for v in last.values())
    assert not all(torch.equal(third[name], last[name]) for name in last), "training went on"


def test_a_step_with_infinite_gradients_stops_all(tmp_path: Path) -> None:
    """Also worker 0, whose loss was finite and whose error this is."""
    with pytest.raises(RuntimeError, match="FloatingPointError: the gradients hold NaN or infinity on all workers"):
        run(tmp_path, Overflow(), options={"depth": Staircase()}, size=3)


# ---- against ddp and against one process -----------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.01},
    {"precision": "bf16-true"},
], ids=str)  # fmt: skip
def test_full_depth_is_ddp(tmp_path: Path, settings: dict[str, Any]) -> None:
    module = {"norm": "bf16-true" not in settings.values(), "optimizer": "adamw", "schedule": True}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    partial = run(ours, Tower(**module), options={"depth": Full()}, max_steps=6, **settings)
    ddp = run(theirs, Tower(**module), strategy=DDPStrategy(start_method="fork"), max_steps=6, **settings)
    tolerance = {"rtol": 0.05, "atol": 0.05} if "precision" in settings else {"rtol": 1e-4, "atol": 1e-5}
    # Buffers: ddp hands them out before a forward, partial backprop after the step; worker 0's are the same.
    for mine, other in zip(partial[0]["parameters"], ddp[0]["parameters"], strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.sampled
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_constant_depth_is_training_with_the_rest_frozen(tmp_path: Path, depth: int) -> None:
    """One process with `requires_grad_(False)` below, on the two workers' batches joined."""
    options = {"depth": Temporal(order=Scripted(4, *[depth] * 9), warm_up=0), "cuts": 3}
    rows = run(tmp_path, Tower(optimizer="momentum"), options=options, batches=Batches(10), max_steps=5)
    module = Tower(optimizer="momentum")
    module.load_state_dict(rows[0]["parameters"][0])
    optimizer = module.configure_optimizers()
    for step in range(5):
        joined = [torch.cat(pair) for pair in zip(batch_of(0, step), batch_of(1, step), strict=True)]
        if step == 0:
            module = Tower(optimizer="momentum")
            optimizer = module.configure_optimizers()
        lowest = 0 if step == 0 else 4 - depth
        frozen = [*module.network.embedding.parameters(), *module.network.blocks[:lowest].parameters()]
        for parameter in frozen if lowest else []:
            parameter.requires_grad_(False)
        optimizer.zero_grad()
        module.loss(joined).backward()
        optimizer.step()
        torch.testing.assert_close(rows[1]["parameters"][step], dict(module.state_dict()), rtol=1e-4, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("absent", [Skip(), Decay()], ids=str)
def test_what_the_optimizer_does_to_blocks_without_a_gradient(tmp_path: Path, absent: Any, optimizer: str) -> None:
    """Step 0 trains all, step 1 the top; the bottom after it, by closed form from the state after step 0."""
    options = {"depth": Temporal(order=Scripted(4, 1), warm_up=0), "cuts": 3, "absent": absent}
    rows = run(tmp_path, Tower(optimizer=optimizer), options=options, max_steps=2)
    assert_equal(rows)
    name = "network.embedding.weight"
    x, y = rows[0]["parameters"][0][name], rows[0]["parameters"][1][name]
    gradient, start = rows[0]["gradients"][0][name], Tower().state_dict()[name]
    rate = {"momentum": 0.1, "adamw": 0.01}[optimizer]
    parameter = nn.Parameter(start.clone())
    torch_optimizer: torch.optim.Optimizer = (
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1)
        if optimizer == "momentum"
        else torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1)
    )
    parameter.grad = gradient.clone()
    torch_optimizer.step()
    torch.testing.assert_close(parameter.detach(), x)
    expected = {Skip: x, Decay: x * (1 - rate * 0.1)}[type(absent)]
    torch.testing.assert_close(y, expected)
    assert name not in rows[0]["gradients"][1]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_block_coordinates_with_states_forgotten_are_badam(tmp_path: Path, tied: bool) -> None:
    """One process that gives a new AdamW the block's parameters alone, all others frozen, at every change of block."""
    depth = BlockCoordinate(every=2)
    options = {"depth": depth, "cuts": "blocks", "absent": Forget()}
    rows = run(tmp_path, Tower(tied, optimizer="adamw"), options=options, batches=Batches(24), max_steps=24)
    module = Tower(tied)
    optimizer: Any = None
    # A tied embedding belongs to the head, and leaves nothing in front of the first block.
    assert rows[0]["boundaries"] == (*(f"network.blocks.{i}" for i in range(tied, 4)), "network.head")
    for step in range(24):
        (block,) = depth.trained(0, 2, step, 6 - tied)
        names = [n for n, segment in rows[0]["segment_of"].items() if segment == block]
        if step % 2 == 0:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in names)
            own = [p for p in module.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(own, lr=0.01, weight_decay=0.1)
        joined = [torch.cat(pair) for pair in zip(batch_of(0, step), batch_of(1, step), strict=True)]
        optimizer.zero_grad()
        module.loss(joined).backward()
        optimizer.step()
        torch.testing.assert_close(rows[1]["parameters"][step], dict(module.state_dict()), rtol=1e-4, atol=1e-5)


class Bare(Watch):
    """What the optimizer holds, in parameters, and which of them require a gradient where users look."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, *args)
        self.more.setdefault("required", []).append(all(p.requires_grad for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        states = trainer.optimizers[0].state
        self.more.setdefault("held", []).append(sum(p.numel() for p in states if states[p]))


@pytest.mark.parametrize(("absent", "bounded"), [(Forget(), True), (Skip(), False)], ids=str)
def test_forgetting_bounds_what_the_optimizer_holds(tmp_path: Path, absent: Any, bounded: bool) -> None:
    options = {"depth": BlockCoordinate(every=1), "cuts": "blocks", "absent": absent}
    (row,) = run(tmp_path, Tower(optimizer="adamw"), options=options, size=1, max_steps=6, callbacks=[Bare(tmp_path)])
    sizes = [0] * 6
    for name, parameter in Tower().named_parameters():
        sizes[row["segment_of"][name]] += parameter.numel()
    visited = [sizes[BlockCoordinate(every=1).trained(0, 1, step, 6)[0]] for step in range(6)]
    assert row["held"] == (visited if bounded else [sum(visited[: i + 1]) for i in range(6)])
    assert all(row["required"]), "what is bypassed is so between forward and backward only"


class Sometimes(Tower):
    """At the second batch the loss of worker 1 reaches the head alone."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = torch.ones(len(x), 8) if self.global_rank == 1 and self.global_step == 1 else None
        return nn.functional.cross_entropy(self.network(x) if h is None else self.network.head(h), y)


@pytest.mark.parametrize("mode", [Full(), PerWorker(fractions=(1.0, 0.25))], ids=str)
def test_a_worker_without_any_gradient_counts_as_zero(tmp_path: Path, mode: Any) -> None:
    rows = run(tmp_path, Sometimes(), options={"depth": mode, "cuts": 3}, max_steps=4)
    assert_equal(rows, 4)
    module = Tower()
    module.load_state_dict(rows[0]["parameters"][0])
    module.loss(batch_of(0, 1)).backward()
    halves = {n: p.grad / 2 for n, p in module.named_parameters() if n.startswith("network.blocks.3")}
    torch.testing.assert_close({n: rows[0]["gradients"][1][n] for n in halves}, halves)


class Gate(Tower):
    """A branch that only worker 0 uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.network.extra = nn.Linear(6, 6)
        self.network.idle = nn.Linear(6, 6)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.network(x)
        logits = self.network.extra(logits) if self.global_rank == 0 else logits
        return nn.functional.cross_entropy(logits, y)


def test_parameters_that_some_or_none_use(tmp_path: Path) -> None:
    rows = run(tmp_path, Gate(), options={"depth": Staircase()}, max_steps=3)
    assert_equal(rows, 3)
    for row in rows:
        for gradients in row["gradients"]:
            assert "network.extra.weight" in gradients
            assert "network.idle.weight" not in gradients, "made up from nothing"


# ---- freezing (Lightning #20340) -------------------------------------------------------------------------------------


class Backbone(Tower):
    """The bottom is a frozen backbone at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.network.embedding, *self.network.blocks[:2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def thawed(folder: Path, **words: Any) -> list[dict[str, Any]]:
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.05)
    return run(folder, Backbone(), callbacks=[finetuning], max_steps=-1, max_epochs=3, batches=Batches(4), **words)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [Full(), Temporal(warm_up=0), Staircase()], ids=str)
def test_unfreezing_keeps_replicas_equal(tmp_path: Path, mode: Any) -> None:
    rows = thawed(tmp_path, options={"depth": mode, "cuts": ["network.blocks.1", "network.blocks.3"]})
    assert_equal(rows, 12)
    name = "network.blocks.0.first.weight"
    assert torch.equal(rows[0]["parameters"][3][name], Backbone().state_dict()[name]), "frozen in epoch 0"
    assert not torch.equal(rows[0]["parameters"][-1][name], rows[0]["parameters"][3][name])


def test_plain_ddp_lets_replicas_diverge_after_unfreezing(tmp_path: Path) -> None:
    """What the strategy is compared with; if this fails, Lightning has mended it and the documentation must change."""
    rows = thawed(tmp_path, strategy=DDPStrategy(start_method="fork"))
    with pytest.raises(AssertionError, match="network"):
        assert_equal(rows)


# ---- validation, checkpoints, ends -----------------------------------------------------------------------------------


class GradModes(Watch):
    """The grad mode and graph that validation sees."""

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.enable_grad():
            self.more.setdefault("graph", []).append(pl_module.loss(batch_of(0, 0)).requires_grad)
            pl_module.loss(batch_of(0, 0)).backward()
        own = [n for n, p in pl_module.named_parameters() if p.grad is not None]
        self.more.setdefault("reached", []).append(len(own))
        pl_module.zero_grad()


def test_validation_is_untouched(tmp_path: Path) -> None:
    options = {"depth": Temporal(order=Scripted(1, 4), warm_up=0), "cuts": 3}
    callbacks = [GradModes(tmp_path)]
    rows = run(tmp_path, Tower(), options=options, callbacks=callbacks, validation=Batches(2), max_steps=6)
    count = len(list(Tower().parameters()))
    for row in rows:
        assert row["graph"] == [True, True]
        assert row["reached"] == [count, count], "the whole network has a graph outside of training"


class Failing(Tower):
    """The forward fails below the cut at the third batch."""

    def loss(self, batch: Any) -> Tensor:
        if getattr(self, "fail", False):
            raise ArithmeticError("broken on purpose")
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.network.blocks[0].register_forward_hook(broken)
        return super().training_step(batch, batch_idx)


def broken(*_: Any) -> None:
    raise ArithmeticError("broken on purpose")


def fail(folder: Path) -> tuple[bool, bool]:
    before = torch.is_grad_enabled()
    strategy = PartialBackpropStrategy(depth=Temporal(order=Scripted(1, 4), warm_up=0), cuts=3)
    trainer = Trainer(**QUIET, max_steps=4, devices=1, strategy=strategy)
    with pytest.raises(ArithmeticError, match="on purpose"):
        trainer.fit(Failing(), Batches(6))
    return before, torch.is_grad_enabled()


def test_an_exception_leaves_the_grad_mode(tmp_path: Path) -> None:
    assert in_processes(fail, tmp_path) == (True, True)


def test_one_worker_trains_alone(tmp_path: Path) -> None:
    rows = run(
        tmp_path, Tower(), options={"depth": Temporal(order=Scripted(4, 2), warm_up=0), "cuts": 3}, size=1, max_steps=2
    )
    alone = rows[0]["gradients"]
    assert len(alone[0]) == len(list(Tower().parameters()))
    assert {name.split(".")[2] for name in alone[1] if "blocks" in name} == {"2", "3"}


class Save(Watch):
    """A checkpoint after four steps."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.folder.parent / "middle.ckpt")


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [Temporal(warm_up=0), Staircase(), BlockCoordinate(every=3)], ids=str)
def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path: Path, mode: Any) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    whole.mkdir(), rest.mkdir()
    options = {"depth": mode}
    batches = {"batches": Batches(4), "max_steps": 10}
    module = {"norm": True, "optimizer": "adamw", "schedule": True}
    all_rows = run(whole, Tower(**module), options=options, callbacks=[Save(whole)], **batches)
    checkpoint = str(tmp_path / "middle.ckpt")
    rows = run(rest, Tower(**module), options=options, callbacks=[Watch(rest)], checkpoint=checkpoint, **batches)
    assert_equal(rows, 6)
    for mine, other in zip(rows[0]["parameters"], all_rows[0]["parameters"][4:], strict=True):
        for name, value in other.items():
            assert torch.equal(mine[name], value), name
    stored = torch.load(checkpoint, weights_only=True)
    assert stored["partial_backprop"]["boundaries"] == list(rows[0]["boundaries"])
    Tower(**module).load_state_dict(stored["state_dict"])


class Dropping(Tower):
    """Draws random numbers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.network.blocks[1].first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.network.blocks[3].first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))


class Resumable(Batches):
    """Goes on within an epoch."""

    begun = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        rank, first = int(os.environ.get("LOCAL_RANK", "0")), self.begun
        self.begun = 0
        for index in range(first, self.length):
            self.at = index + 1
            yield batch_of(rank, index)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begun = state["at"]


@pytest.mark.sampled
@pytest.mark.parametrize("batches", [4, 10], ids=["an epoch's end", "mid-epoch"])
def test_a_resumed_run_drops_out_what_the_whole_one_does(tmp_path: Path, batches: int) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    whole.mkdir(), rest.mkdir()
    settings: dict[str, Any] = {
        "options": {"depth": Temporal(warm_up=0)},
        "batches": Resumable(batches),
        "max_steps": 9,
    }
    all_rows = run(whole, Dropping(), callbacks=[Save(whole)], **settings)
    rows = run(rest, Dropping(), callbacks=[Watch(rest)], checkpoint=str(tmp_path / "middle.ckpt"), **settings)
    assert_equal(rows, 5)
    for mine, other in zip(rows[0]["parameters"], all_rows[0]["parameters"][4:], strict=True):
        for name, value in other.items():
            assert torch.equal(mine[name], value), name


def test_a_longer_run_keeps_the_warm_up_of_the_shorter_one(tmp_path: Path) -> None:
    """A quarter of ten steps, also where the resumed run has thirty."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    whole.mkdir(), rest.mkdir()
    rows = run(whole, Tower(), callbacks=[Save(whole)], batches=Batches(4), max_steps=10)
    checkpoint = str(tmp_path / "middle.ckpt")
    longer = run(rest, Tower(), batches=Batches(4), max_steps=30, checkpoint=checkpoint)
    assert torch.load(checkpoint, weights_only=True)["partial_backprop"]["warm_up"] == 2
    for mine, other in zip(longer[0]["parameters"][:6], rows[0]["parameters"][4:], strict=True):
        for name, value in other.items():
            assert torch.equal(mine[name], value), name


def test_the_trained_module_has_no_hooks_left(tmp_path: Path) -> None:
    assert in_processes(hooks_left, tmp_path) == 0


def hooks_left(folder: Path) -> int:
    module = Tower()
    fit(folder, module, {"start_method": "popen"}, {"size": 1})
    found = [h for m in module.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return len(found) + sum(len(p._post_accumulate_grad_hooks or {}) for p in module.parameters())


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder: Path, module: LightningModule, options: dict[str, Any], size: int) -> str:
    try:
        fit(folder, module, options, {"size": size})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Synchronized(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.network.sync = nn.SyncBatchNorm(8)


class Manual(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ByHand(Tower):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        loss.backward()


class Chainless(Tower):
    """Two layers in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.network(batch[0])), batch[1])


class Around(Network):
    """The embedding goes around all blocks to the head, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__(tied=False, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h + first)


class Skipping(Tower):
    """The embedding goes around all blocks to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Around()


class Lossless(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


@pytest.mark.sampled
@pytest.mark.parametrize(("module", "options", "message"), [
    (Synchronized, {"depth": Staircase()}, "ValueError: SyncBatchNorm gathers over all workers.*use plain BatchNorm"),
    (Manual, {}, "ValueError: Manual optimizes manually.*use automatic optimization"),
    (ByHand, {}, "ValueError: ByHand overrides backward, .*remove LightningModule.backward"),
    (Chainless, {}, "ValueError: no chain of blocks to cut in Chainless.*give cuts=\\[names\\]"),
    (Skipping, {"cuts": ["network.blocks.2"]}, "ValueError: no cut at network.blocks.2: .*goes around the boundary"),
    (Skipping, {}, "ValueError: no chain of blocks.*goes around the boundary"),
    (Tower, {"cuts": ["network.coffee"]}, "ValueError: no module named 'network.coffee'.*network.blocks.0"),
    (Tower, {"cuts": 4}, "ValueError: 4 cuts need 5 blocks, there are 4.*give fewer cuts"),
    (Tower, {"cuts": ["network.blocks.3", "network.blocks.1"]}, "ValueError: .*in this order"),
    (Tower, {"cuts": ["network.embedding"]}, "ValueError: no cut at network.embedding: no parameter lies below"),
    (Tower, {"depth": PerWorker(fractions=(0.5, 0.5))}, "ValueError: PerWorker.*never trains the lowest 2 of 4"),
    (Tower, {"depth": Temporal(order=Cyclic(fractions=(0.5,)), warm_up=0)}, "never trains the lowest 2 of 4"),
    (Tower, {"depth": PerWorker(fractions=(1.0, 0.5, 0.5))}, "ValueError: PerWorker has 3 fractions for 2 workers"),
    (Lossless, {}, "ValueError: the first training_step returned no loss"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_wrong_uses_are_refused(tmp_path: Path, module: type, options: dict[str, Any], message: str) -> None:
    found = in_processes(refused, tmp_path, module(), options, 2)
    assert re.search(message, found, flags=re.DOTALL), found


@pytest.mark.parametrize(("options", "message"), [
    ({"cuts": 0}, "cuts must be at least 1, got 0"),
    ({"cuts": "coffee"}, "cuts must be 'auto', 'blocks', a number of cuts, or names"),
    ({"cuts": []}, "one or more distinct modules"),
    ({"cuts": ["a", "a"]}, "one or more distinct modules"),
    ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
    ({"coffee": 1}, "no option 'coffee'"),
])  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartialBackpropStrategy(**options)


class Late(Tower):
    """Its network runs in another way after the first batches: the bottom is used behind the top, too."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + self.network.embedding.weight.sum() if self.global_step > 1 else loss


def test_a_gradient_that_appears_below_the_cut_is_an_error(tmp_path: Path) -> None:
    options = {"depth": Staircase(), "cuts": 3}
    found = in_processes(refused, tmp_path, Late(), options, 2)
    assert "RuntimeError: a gradient appeared below the cut" in found


def test_unequal_numbers_of_batches_are_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended its epoch after 3 steps.*same number of batches|lost"):
        run(tmp_path, Tower(), batches=Batches(6, lengths=(3, 6)), max_steps=-1, max_epochs=1)


def use_twice(folder: Path) -> list[str]:
    """The same strategy and trainer for a second fit."""
    strategy = PartialBackpropStrategy(cuts=2, start_method="popen")
    trainer = Trainer(**QUIET, max_steps=2, devices=1, strategy=strategy)
    trainer.fit(Tower(), Batches(6))
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Tower(), Batches(6))
    return [str(trainer.global_step)]


def test_a_second_fit(tmp_path: Path) -> None:
    assert in_processes(use_twice, tmp_path) == ["4"]
