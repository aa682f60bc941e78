"""Everything of Lightning that works under `ddp` keeps working; its traps are closed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import lightning_decentral
from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Combine,
    Complete,
    Every,
    OnePeerExponential,
    OuterNesterov,
    PushSum,
    QuasiGlobalMomentum,
    Ring,
    Topology,
)
from tests.tiny import QUIET, Batches, Net, SizedBatches, TwoOptimizers, in_processes

SIZE = 3


class Watched(Trainer):
    """Writes every worker's own error to `folder/rank.error`: a launcher only hands on the first."""

    folder: Path

    def _fit_impl(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._fit_impl(*args, **kwargs)
        except BaseException as error:
            (self.folder / f"{self.global_rank}.error").write_text(f"{type(error).__name__}: {error}")
            raise


def errors(folder: Path, size: int = SIZE) -> list[str]:
    """Each worker's error; empty for one that was ended from outside before it had one."""
    paths = [folder / f"{rank}.error" for rank in range(size)]
    return [path.read_text() if path.exists() else "" for path in paths]


class Inspect(Callback):
    """Collects, on every worker, what a test asks for, and writes it to `folder/rank.pt` after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Any] = {}

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After each batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen["steps"] = trainer.global_step
        self.look(trainer, pl_module)
        self.write(trainer)

    def write(self, trainer: Trainer) -> None:
        torch.save(self.seen, self.folder / f"{trainer.global_rank}.pt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["own"] = {k: v.clone() for k, v in pl_module.state_dict().items()}
        self.write(trainer)


def seen(folder: Path, size: int = SIZE) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def fit(
    folder: Path,
    module: LightningModule,
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    callbacks: list[Callback],
    batches: Any,
    size: int = SIZE,
    validation: Any = None,
) -> dict[str, Any]:
    seed_everything(1, workers=True, verbose=False)
    inspect = [] if any(isinstance(c, Inspect) for c in callbacks) else [Inspect(folder)]
    strategy = GossipStrategy(**{"start_method": "fork", **options})
    settings = {**QUIET, "max_steps": 8, **trainer_options}
    trainer = Watched(**settings, devices=size, strategy=strategy, callbacks=[*callbacks, *inspect])
    trainer.folder = folder
    trainer.fit(module, batches, validation)
    return {"state": module.state_dict(), "metrics": dict(trainer.callback_metrics)}


def run(folder: Path, module: LightningModule | None = None, **changes: Any) -> dict[str, Any]:
    arguments = {
        "module": module or Net(),
        "options": {},
        "trainer_options": {},
        "callbacks": [],
        "batches": SizedBatches(6),
        **changes,
    }
    return in_processes(fit_with, folder, arguments)


def fit_with(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    return fit(folder, **arguments)


def assert_mean(state: dict[str, Tensor], rows: list[dict[str, Tensor]]) -> None:
    for key, value in state.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([row[key] for row in rows]).mean(0).to(value.dtype))


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gossip", "gossip_spawn", "gossip_fork", "gossip_notebook"])
def test_names_are_registered_once_and_for_all(name: str) -> None:
    lightning_decentral._register()
    lightning_decentral._register()
    trainer = Trainer(**QUIET, devices=2, strategy=name)
    assert isinstance(trainer.strategy, GossipStrategy)
    assert trainer.strategy._start_method == {"gossip": "popen", "gossip_spawn": "spawn"}.get(name, "fork")


# ---- precision, clipping, compile ------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions_train_and_hand_the_mean_back(tmp_path: Path, precision: str) -> None:
    result = run(tmp_path, Net(dropout=0.0), trainer_options={"precision": precision}, batches=Cast(precision))
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    rows = [s["own"] for s in seen(tmp_path)]
    assert rows[0]["head.weight"].dtype == dtype, "parameters changed their type"
    assert not torch.equal(rows[0]["head.weight"], rows[1]["head.weight"])
    if dtype != torch.bfloat16:
        assert_mean(result["state"], rows)


class Cast(SizedBatches):
    """Batches in the precision's input type."""

    def __init__(self, precision: str) -> None:
        super().__init__(6)
        self._dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield [x.to(self._dtype), y]


class Overflow(Net):
    """Worker 1's loss overflows half precision at step 3."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 3 else loss


class Scale(Inspect):
    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.setdefault("scale", []).append(trainer.precision_plugin.scaler.get_scale())
        self.seen["rounds"] = trainer.strategy.rounds()


def test_a_scaler_per_worker_skips_a_step_alone_and_rounds_stay_paired(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    run(tmp_path, Overflow(dropout=0.0), trainer_options={"plugins": [plugin]}, callbacks=[Scale(tmp_path)])
    rows = seen(tmp_path)
    assert [row["scale"][-1] for row in rows] == [1024.0, 512.0, 1024.0]
    assert [row["rounds"] for row in rows] == [[8]] * SIZE
    assert all(bool(torch.isfinite(v).all()) for row in rows for v in row["own"].values())


class Compiled(Net):
    """Without `self.log`, which dynamo can't trace through in this pair of Lightning and torch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit_compiled(folder: Path, backend: str) -> None:
    strategy = GossipStrategy(start_method="fork")
    module = torch.compile(Compiled(), backend=backend)
    trainer = Trainer(**QUIET, max_steps=4, devices=2, strategy=strategy, callbacks=[Inspect(folder)])
    trainer.fit(module, SizedBatches(6))


@pytest.mark.thorough
def test_a_compiled_module_trains_as_the_plain_one(tmp_path: Path) -> None:
    compiled, plain = tmp_path / "compiled", tmp_path / "plain"
    compiled.mkdir(), plain.mkdir()
    in_processes(fit_compiled, compiled, "aot_eager", seconds=100)
    run(plain, Compiled(), trainer_options={"max_steps": 4}, size=2)
    for a, b in zip(seen(compiled, 2), seen(plain, 2), strict=True):
        torch.testing.assert_close(a["own"], b["own"])


# ---- several optimizers ----------------------------------------------------------------------------------------------


class Two(LightningModule):
    """Two parameters with an optimizer each, manual optimization; the second steps at every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward((self.a - self.global_rank).square().sum())
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward((self.b + self.global_rank).square().sum())
            second.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([self.a], lr=0.1), torch.optim.SGD([self.b], lr=0.2)]


class Bypass(Two):
    """Steps the bare optimizer."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


class Shared(Two):
    """Both optimizers have both parameters, and one has an infinite mask that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([self.a, self.b, self.mask], lr=0.1), torch.optim.SGD([self.b, self.a], lr=0.2)]


def test_an_optimizer_that_steps_past_the_strategy_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"SGD stepped past the strategy.*step what self.optimizers\(\) returns"):
        run(tmp_path, Bypass(), trainer_options={"max_steps": -1, "max_epochs": 1})


def test_optimizers_may_share_parameters(tmp_path: Path) -> None:
    run(tmp_path, Shared(), callbacks=[Rounds(tmp_path)], trainer_options={"max_steps": -1, "max_epochs": 1})
    # After each update of either: all parameters are the first one's.
    assert [row["rounds"] for row in seen(tmp_path)] == [[9, 3]] * SIZE


class Rounds(Inspect):
    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["rounds"] = trainer.strategy.rounds()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.seen["max_steps"] = trainer.max_steps  # as before the fit
        self.write(trainer)


def test_each_optimizer_has_rounds_of_its_own(tmp_path: Path) -> None:
    from lightning_decentral.gossip import Auto, Gossip, simulate

    run(tmp_path, Two(), callbacks=[Rounds(tmp_path)], trainer_options={"max_steps": -1, "max_epochs": 1})
    rows = seen(tmp_path)
    assert [row["rounds"] for row in rows] == [[6, 3]] * SIZE
    ranks = torch.arange(SIZE).float().unsqueeze(1)
    a = simulate(Auto(), Gossip(), lambda x, _: 2 * (x - ranks), torch.zeros(SIZE, 3), 6, 0.1)[-1]
    b = simulate(Auto(), Gossip(), lambda x, _: 2 * (x + ranks), torch.zeros(SIZE, 2), 3, 0.2)[-1]
    torch.testing.assert_close(torch.stack([row["own"]["a"] for row in rows]), a)
    torch.testing.assert_close(torch.stack([row["own"]["b"] for row in rows]), b)


class Untrained(Net):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("options", [{}, {"exact_steps": 2, "combine": PushSum()}], ids=str)
def test_without_an_optimizer_nothing_is_trained_or_mixed(tmp_path: Path, options: dict[str, Any]) -> None:
    module = Untrained()
    save = ModelCheckpoint(tmp_path, filename="untrained")
    changes = {"max_steps": -1, "max_epochs": 1, "enable_checkpointing": True}
    run(tmp_path, module, options=options, callbacks=[save], trainer_options=changes, size=2)
    saved = torch.load(tmp_path / "untrained.ckpt", weights_only=True)["state_dict"]
    for state in (saved, *(row["own"] for row in seen(tmp_path, 2))):
        assert [name for name, p in module.named_parameters() if not torch.equal(state[name], p)] == []


class Backbone(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.backbone = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.head.parameters() if p.requires_grad], lr=0.1)


def test_parameters_that_an_optimizer_gets_while_training_are_mixed_too(tmp_path: Path) -> None:
    """Lightning #20340: under DDP unfrozen parameters never enter the reducer. Complete, blocking: equal workers."""
    from lightning_decentral.gossip import Complete

    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    run(
        tmp_path,
        Backbone(),
        callbacks=[finetuning],
        options={"topology": Complete(), "delay": 0},
        trainer_options={"max_steps": -1, "max_epochs": 3},
    )
    rows = [row["own"] for row in seen(tmp_path)]
    before = Backbone()
    assert all(not torch.equal(row["backbone.weight"], rows[0]["backbone.bias"]) for row in rows)
    for row in rows[1:]:
        torch.testing.assert_close(row["backbone.weight"], rows[0]["backbone.weight"])
    assert before.backbone.weight.shape == rows[0]["backbone.weight"].shape


# ---- the mean model --------------------------------------------------------------------------------------------------


class Validating(Inspect):
    """The weights that validation sees, and the own ones before and after."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        self.seen.setdefault("before", []).append(_copy(pl_module))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen["during"] = _copy(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.setdefault("after", []).append(_copy(pl_module))


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("evaluate", ["mean", "own"])
def test_validation_uses_the_mean_and_leaves_no_trace(tmp_path: Path, evaluate: str) -> None:
    run(
        tmp_path,
        callbacks=[Validating(tmp_path)],
        options={"evaluate": evaluate},
        trainer_options={"val_check_interval": 4},
        validation=SizedBatches(2),
    )
    rows = seen(tmp_path)
    for row in rows:
        # Validation ran after batch 4 of the second epoch at the latest: what training had before is there after.
        assert all(torch.equal(v, row["after"][4][k]) for k, v in row["before"][3].items())
    own = [row["before"][3] for row in rows]
    if evaluate == "mean":
        assert_mean(rows[0]["during"], own)
        assert all(
            torch.equal(rows[0]["during"][k], row["during"][k]) for row in rows for k in own[0] if "num" not in k
        )
    else:
        assert all(torch.equal(v, row["during"][k]) for row in rows for k, v in row["before"][3].items())


def test_early_stopping_and_best_checkpoint_agree_on_all_workers(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        callbacks=[
            EarlyStopping("val_loss", patience=1, min_delta=10.0),
            ModelCheckpoint(tmp_path, monitor="val_loss"),
        ],
        trainer_options={"max_steps": -1, "max_epochs": 9, "enable_checkpointing": True},
        validation=SizedBatches(2),
    )
    assert [row["steps"] for row in seen(tmp_path)] == [12] * SIZE
    assert "val_loss" in result["metrics"]
    (path,) = tmp_path.glob("*.ckpt")
    assert len(list((tmp_path / ".workers" / path.stem).iterdir())) == SIZE


@pytest.mark.sampled
@pytest.mark.parametrize("averaging", ["ema", "swa"])
def test_weight_averaging_callbacks_hand_back_the_mean_of_their_averages(tmp_path: Path, averaging: str) -> None:
    callback = (
        EMAWeightAveraging(decay=0.5) if averaging == "ema" else StochasticWeightAveraging(0.05, swa_epoch_start=1)
    )
    result = run(
        tmp_path,
        callbacks=[callback],
        trainer_options={"max_steps": -1, "max_epochs": 3},
        validation=SizedBatches(2),
    )
    rows = [row["own"] for row in seen(tmp_path)]  # Inspect runs last: after the callback put its average in place
    assert not torch.equal(rows[0]["head.weight"], rows[1]["head.weight"])
    assert_mean(result["state"], rows)


def test_the_checkpoint_of_an_averaged_model_holds_the_mean_of_the_averages(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="last", save_weights_only=False)
    run(
        tmp_path,
        callbacks=[EMAWeightAveraging(decay=0.5), checkpoint],
        trainer_options={"max_steps": -1, "max_epochs": 1, "enable_checkpointing": True},
        validation=SizedBatches(2),
    )
    rows = [row["own"] for row in seen(tmp_path)]
    assert_mean(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"], rows)


class Best(Net):
    """Counts validations in a buffer; validation of worker 1 gives its parameters new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("validations", torch.zeros(()))

    def on_validation_epoch_end(self) -> None:
        self.validations += 1
        if self.global_rank == 1:
            self.head.weight.data = self.head.weight.data.clone()


def test_what_validation_itself_changes_stays_changed(tmp_path: Path) -> None:
    run(
        tmp_path,
        Best(),
        callbacks=[Validating(tmp_path)],
        trainer_options={"val_check_interval": 4},
        validation=SizedBatches(2),
    )
    for row in seen(tmp_path):
        assert [float(after["validations"]) for after in row["after"]] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert torch.equal(row["before"][3]["head.weight"], row["after"][4]["head.weight"])


# ---- evaluation as the first call ------------------------------------------------------------------------------------


class Unequal(Net):
    """Every worker builds other weights."""

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            self.head.weight.fill_(float(self.global_rank + 1))


def evaluate_first(call: str, evaluate: str) -> list[float]:
    module = Unequal(dropout=0.0)
    strategy = GossipStrategy(start_method="fork", evaluate=evaluate)
    trainer = Trainer(**QUIET, devices=2, strategy=strategy, callbacks=[HeadWeight()])
    getattr(trainer, call)(module, SizedBatches(2))
    return [float(v) for v in trainer.callback_metrics.values()]


class HeadWeight(Callback):
    """Every worker's weight while evaluating must be worker 0's (mean) or its own."""

    def _check(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        weight = float(pl_module.head.weight[0, 0])
        assert weight == (1.0 if trainer.strategy.evaluate == "mean" else trainer.global_rank + 1), weight

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _check


@pytest.mark.sampled
@pytest.mark.parametrize("call", ["validate", "test", "predict"])
@pytest.mark.parametrize("evaluate", ["mean", "own"])
def test_evaluation_works_as_the_first_call(call: str, evaluate: str) -> None:
    values = in_processes(evaluate_first, call, evaluate)
    assert call == "predict" or all(v == v for v in values)


# ---- buffers, frozen parameters, other models ------------------------------------------------------------------------


class DifferentStart(Net):
    """Each worker starts from other values, in frozen parameters and buffers too."""

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.add_(self.global_rank)


class Start(Inspect):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["start"] = _copy(pl_module)


def test_all_workers_start_from_worker_0(tmp_path: Path) -> None:
    run(tmp_path, DifferentStart(), callbacks=[Start(tmp_path)])
    first, *others = (row["start"] for row in seen(tmp_path))
    assert torch.equal(first["norm.running_mean"], torch.zeros(8))
    assert all(torch.equal(v, other[k]) for other in others for k, v in first.items())


class DifferentModel(Net):
    """Worker 1 has one more layer."""

    def configure_model(self) -> None:
        if self.global_rank == 1:
            self.extra = nn.Linear(2, 2)


def test_workers_with_different_models_are_told_which_tensor(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"worker 1 has extra.weight \(2, 2\) torch.float32 where worker 0 has no extra.weight"
    ):
        run(tmp_path, DifferentModel())


class Reordered(LightningModule):
    """Its gradients are zero, so whatever moves it is wrong; all workers change its memory format before the first
    step, and worker 1 once more while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            self.conv.to(memory_format=torch.channels_last)
        return 0 * self.conv.weight.square().sum()

    def on_fit_start(self) -> None:
        self.conv.to(memory_format=torch.channels_last)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "combine", [QuasiGlobalMomentum(), OuterNesterov(lr=0.7)], ids=lambda rule: type(rule).__name__
)
def test_another_memory_format_after_set_up_moves_nothing(tmp_path: Path, combine: Combine) -> None:
    module = Reordered()
    expected = module.conv.weight.detach().clone()
    topology = Every(2, Complete()) if isinstance(combine, OuterNesterov) else Ring()
    found = run(tmp_path, module, options={"combine": combine, "topology": topology}, size=2)
    torch.testing.assert_close(found["state"]["conv.weight"].contiguous(), expected)


class WithSyncBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(8)


@pytest.mark.parametrize("how", ["option", "module"])
def test_sync_batch_norm_is_refused(tmp_path: Path, how: str) -> None:
    module = Net() if how == "option" else WithSyncBatchNorm()
    options = {"sync_batchnorm": True} if how == "option" else {}
    with pytest.raises(RuntimeError, match="use plain BatchNorm"):
        run(tmp_path, module, trainer_options=options)


# ---- stopping together -----------------------------------------------------------------------------------------------


class Sigterm(Inspect):
    """Worker 1, which has no children to forward it to, gets a SIGTERM after its third step."""

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_of_one_worker_stops_all_after_the_same_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 143"):
        run(tmp_path, callbacks=[Sigterm(tmp_path)], trainer_options={"max_steps": 100_000})
    assert [error.split(":")[0] for error in errors(tmp_path)] == ["SIGTERMException"] * SIZE
    steps = [row["steps"] for row in seen(tmp_path)]
    assert steps == steps[:1] * SIZE
    assert 3 < steps[0] < 100_000


class Waits(Inspect):
    """Worker 0 begins its 11th step when the others have begun their 20th: never, if they must wait for it."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        here = self.folder / f"{trainer.global_rank}.{batch_idx}"
        here.touch()
        others = [self.folder / f"{rank}.19" for rank in range(1, trainer.world_size)]
        end = time.monotonic() + 30
        while trainer.global_rank == 0 and batch_idx == 10 and not all(path.exists() for path in others):
            assert time.monotonic() < end, "a worker waited for worker 0"
            time.sleep(0.01)


def test_no_barrier_before_every_batch(tmp_path: Path) -> None:
    """One exchange in 100 steps: the others run ahead of a slow worker 0, which Lightning's broadcast would forbid."""
    from lightning_decentral.gossip import Every

    run(
        tmp_path,
        callbacks=[Waits(tmp_path)],
        options={"topology": Every(100, Ring())},
        trainer_options={"max_steps": 20},
        batches=SizedBatches(20),
    )
    assert [row["steps"] for row in seen(tmp_path)] == [20] * SIZE


# ---- unequal numbers of batches, lost workers, NaN -------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("sized", [False, True], ids=["iterable", "sized"])
def test_unequal_numbers_of_batches_do_not_hang(tmp_path: Path, delay: int, sized: bool, capfd: Any) -> None:
    class_ = Uneven if sized else Batches
    run(
        tmp_path,
        callbacks=[Rounds(tmp_path)],
        options={"delay": delay, "topology": OnePeerExponential()},
        trainer_options={"max_steps": -1, "max_epochs": 2},
        batches=class_(lengths=(5, 3, 7)),
        validation=SizedBatches(2),
    )
    assert [row["steps"] for row in seen(tmp_path)] == [10, 6, 14]
    assert "worker 0 ended after round 5, worker 1 ended after round 3, the longest took 7" in capfd.readouterr().err


class Uneven(Batches):
    def __len__(self) -> int:
        return self._lengths[self._rank]


class Critic(TwoOptimizers):
    """Three updates of the first optimizer for one of the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.update(batch, 0, 0, 0, 1)


@pytest.mark.sampled
@pytest.mark.parametrize(("delay", "topology"), [(0, Complete()), (0, Ring()), (1, Complete())], ids=str)
def test_unequal_numbers_of_batches_with_two_optimizers(tmp_path: Path, delay: int, topology: Topology) -> None:
    run(
        tmp_path,
        Critic(),
        options={"delay": delay, "topology": topology},
        trainer_options={"max_steps": -1, "max_epochs": 2},
        batches=Batches(lengths=(5, 3, 7)),
    )
    assert [row["steps"] for row in seen(tmp_path)] == [40, 24, 56]


@pytest.mark.sampled
@pytest.mark.parametrize("validation", [None, SizedBatches(2)], ids=["plain", "validated"])
@pytest.mark.parametrize("class_", [Batches, Uneven])
def test_all_stop_where_the_first_is_at_max_steps(tmp_path: Path, class_: type[Batches], validation: Any) -> None:
    """In the second epoch two are at nine steps before their batches end, and one has only six."""
    batches, most = class_(lengths=(5, 3, 7)), {"max_steps": 9, "max_epochs": -1, "min_epochs": 3}
    run(tmp_path, callbacks=[Rounds(tmp_path)], trainer_options=most, batches=batches, validation=validation)
    assert [(row["steps"], row["max_steps"]) for row in seen(tmp_path)] == [(9, 9), (6, 9), (9, 9)]


class Leaves(Net):
    """Worker 1 ends its epochs after two batches, without Lightning's validation at their end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 1 and batch_idx == 2 else None


class Validated(Inspect):
    validated = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert not pl_module.training
        self.seen["validated"] = self.validated = self.validated + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert pl_module.training
        self.write(trainer)


def test_all_validate_where_one_left_its_epoch(tmp_path: Path) -> None:
    run(
        tmp_path,
        Leaves(),
        callbacks=[Validated(tmp_path)],
        trainer_options={"max_steps": -1, "max_epochs": 2},
        batches=SizedBatches(4),
        validation=SizedBatches(2),
    )
    assert [(row["steps"], row["validated"]) for row in seen(tmp_path)] == [(8, 2), (4, 2), (8, 2)]


class Reduces(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, sync_dist=True)
        return loss


def test_unequal_batches_with_values_averaged_in_every_step_end_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"give every worker the same number of batches, or log with sync_dist=False|lost",
    ):
        run(tmp_path, Reduces(), trainer_options={"max_steps": -1, "max_epochs": 1}, batches=Batches(lengths=(5, 3, 7)))
    assert any("another waits for all workers within it" in error for error in errors(tmp_path))


class Dies(Inspect):
    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os._exit(3)


@pytest.mark.thorough
def test_a_worker_that_dies_ends_the_others_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"exit code 3|lost"):
        run(tmp_path, callbacks=[Dies(tmp_path)], trainer_options={"max_steps": 10_000}, batches=SizedBatches(10_000))
    assert time.monotonic() - started < 200  # not the minutes that a worker waits for another


class Poisoned(Net):
    """Worker 1's parameters become NaN at step 3."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_rank == 1 and self.global_step == 3:
            with torch.no_grad():
                self.head.weight[0, 0] = torch.nan


class Ends(Inspect):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["healed"] = trainer.strategy.traffic().healed
        moments = [v for o in trainer.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
        self.seen["finite"] = all(bool(t.isfinite().all()) for t in (*pl_module.parameters(), *moments))
        self.write(trainer)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_poisoned_worker_is_healed_and_goes_on(tmp_path: Path, delay: int) -> None:
    """Parameter, moments, and by the mean the statistics of BatchNorm, which no neighbour sends."""
    result = run(tmp_path, Poisoned("adamw"), callbacks=[Ends(tmp_path)], options={"delay": delay})
    assert [row["healed"] > 0 for row in seen(tmp_path)] == [False, True, False]
    assert all(row["finite"] for row in seen(tmp_path))
    assert all(value.isfinite().all() for value in result["state"].values())


def test_the_sender_of_nan_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(tmp_path, Poisoned(), options={"heals": 0})
    first, second, third = errors(tmp_path)
    assert second.startswith("FloatingPointError: worker 1: its parameters hold NaN or infinity in round 3")
    assert "NaN" not in first + third


def test_one_worker_trains_like_a_single_device(tmp_path: Path) -> None:
    run(tmp_path, Net(dropout=0.0), size=1)
    plain = Net(dropout=0.0)
    seed_everything(1, workers=True, verbose=False)
    Trainer(**QUIET, max_steps=8, devices=1).fit(plain, SizedBatches(6))
    (row,) = seen(tmp_path, 1)
    assert all(torch.equal(v, row["own"][k]) for k, v in plain.state_dict().items())


# ---- what the start says ---------------------------------------------------------------------------------------------


class KeepSummary(Inspect):
    """What StartSummary would print."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.seen["summary"] = trainer.strategy.summary()


@pytest.mark.sampled
@pytest.mark.parametrize(("optimizer", "size", "named"), [
    ("adamw", 2, "AdamW takes smaller steps here than under ddp. "),
    ("adamw", 1, None),
    ("accum_adamw", 2, None),
    ("muon", 2, None),
    ("sgd", 2, None),
])  # fmt: skip
def test_the_start_names_what_adam_does_here(optimizer: str, size: int, named: str | None, tmp_path: Path) -> None:
    run(tmp_path, Net(optimizer), callbacks=[KeepSummary(tmp_path)], size=size)
    hints = [found["summary"].get("hint") for found in seen(tmp_path, size)]
    assert all(hint.startswith(named) if named else hint is None for hint in hints)
