"""A real trainer with forked stages against the plain single-process run."""

import itertools
import json

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.pipeline import (
    Balanced,
    Chain,
    OneForwardOneBackward,
    PipelineReport,
    Planned,
    Recompute,
    TeraPipe,
    Uniform,
    ZeroBubble,
    blocks_of,
    stage_gradients,
)
from lightning_decentral.pipeline.compute.causal import trial
from tests.pipeline.training import Language, alone, ddp, distance, fit, forked, pipeline
from tests.tiny import QUIET, in_processes


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_training_is_that_of_one_process(tmp_path, monkeypatch, devices):
    """Here each stage tries the model in slices by itself."""
    monkeypatch.setattr(trial, "_known", {})
    wanted, losses, metrics = fit(Language(), alone(), tmp_path / "alone")
    found, found_losses, found_metrics = forked(Language(), pipeline(devices), tmp_path / "pipeline")
    assert found_losses == pytest.approx(losses, rel=1e-10)
    assert distance(found, wanted) < 1e-9
    assert found_metrics == pytest.approx(metrics, rel=1e-6)
    assert {"train/loss", "train/epoch_loss", "val/loss"} <= set(found_metrics)


VARIANTS = {
    "clipped by norm": ({}, {"gradient_clip_val": 0.1}),
    "clipped by value": ({}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "accumulated": ({}, {"accumulate_grad_batches": 3}),
    "three micro-batches": ({"microbatches": 3}, {}),
    "all forward, all backward": ({"microbatches": 2, "schedule": TeraPipe()}, {"gradient_clip_val": 0.1}),
    "recomputed": ({"activations": Recompute()}, {}),
    "split backward": ({"microbatches": 2, "schedule": ZeroBubble()}, {"gradient_clip_val": 0.1}),
}


# All with weights that two stages hold; without them where a batch is cut, and where forwards are repeated.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variant", "name"),
    [*((variant, "gpt2, tied") for variant in VARIANTS), ("three micro-batches", "llama"), ("recomputed", "llama")],
)
def test_what_lightning_does_to_a_loss_stays_right(tmp_path, variant, name):
    options, trainer = VARIANTS[variant]
    module = Language(name, scheduler=True)
    wanted, losses, _ = fit(Language(name, scheduler=True), alone(), tmp_path / "alone", **trainer)
    found, found_losses, _ = forked(module, pipeline(2, **options), tmp_path / "pipeline", **trainer)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-8


class Orthogonal(Language):
    def configure_optimizers(self):
        return Muon(muon_groups(self), lr=1e-2)


def test_a_stage_knows_hidden_matrices_from_tables_and_heads(tmp_path):
    """Of three stages the second has neither, and the third a tied head without its table."""
    wanted, losses, _ = fit(Orthogonal(), alone(), tmp_path / "alone", accumulate_grad_batches=2)
    found, found_losses, _ = forked(Orthogonal(), pipeline(3), tmp_path / "pipeline", accumulate_grad_batches=2)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-8


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), ZeroBubble()], ids=lambda s: type(s).__name__)
def test_bf16_mixed(tmp_path, schedule):
    options = {"precision": "bf16-mixed"}
    make = lambda: Language(dtype=torch.float32, sgd=True)  # noqa: E731
    wanted, losses, _ = fit(make(), alone(), tmp_path / "a", **options)
    found, found_losses, _ = forked(make(), pipeline(2, schedule=schedule), tmp_path / "b", **options)
    assert found_losses == pytest.approx(losses, rel=2e-3)
    assert distance(found, wanted) < 1e-2


def half(first_scale: float) -> MixedPrecision:
    """16-mixed on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=1000))


@pytest.mark.sampled
@pytest.mark.parametrize("first_scale", [2.0**10, 2.0**22])
def test_16_mixed_with_one_scale_for_all_stages(tmp_path, first_scale):
    """The larger scale overflows at first: all stages skip these steps and halve the scale together."""
    make = lambda: Language("llama", torch.float32, sgd=True)  # noqa: E731
    scales = Scales(tmp_path / "a"), Scales(tmp_path / "b")
    fit(make(), alone(), tmp_path / "a", plugins=[half(first_scale)], callbacks=[scales[0]], max_steps=9)
    forked(make(), pipeline(2), tmp_path / "b", plugins=[half(first_scale)], callbacks=[scales[1]], max_steps=9)
    wanted, *found = (torch.load(tmp_path / name) for name in ("a/0.pt", "b/0.pt", "b/1.pt"))
    assert found[0][0] == found[1][0]
    overflows = first_scale > 2**20
    assert (found[0][0][0] < first_scale) == (wanted[0][0] < first_scale) == overflows
    # Close to its limit, half precision overflows a step earlier or later where it's summed in another order.
    steps = [scale < before for before, scale in itertools.pairwise([first_scale, *found[0][0]])]
    assert sum(steps) < 9
    for stage in found if not overflows else []:
        assert distance(stage[1], {name: wanted[1][name] for name in stage[1]}) < 1e-2


class Scales(Callback):
    """The loss scale after each step, and the parameters in the end, on every worker."""

    def __init__(self, folder):
        self._folder, self._scales = folder, []

    def on_train_batch_end(self, trainer, *_):
        self._scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_end(self, trainer, pl_module):
        self._folder.mkdir(exist_ok=True)
        state = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        torch.save((self._scales, state), self._folder / f"{trainer.global_rank}.pt")


class Masked(Language):
    """Where a sequence begins with an even token it has no targets: some micro-batch of one has a mean over nothing."""

    def training_step(self, batch, batch_idx):
        ids, mask, labels = batch
        return super().training_step([ids, mask, labels.masked_fill(ids[:, :1] % 2 == 0, -100)], batch_idx)


def test_a_micro_batch_without_targets_adds_nothing(tmp_path):
    wanted, losses, _ = fit(Masked("llama"), alone(), tmp_path / "alone")
    found, found_losses, _ = forked(Masked("llama"), pipeline(2, microbatches=3), tmp_path / "pipeline")
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-8


def test_a_report_draws_the_last_step(tmp_path):
    forked(
        Language("llama"), pipeline(2), tmp_path / "x", callbacks=[PipelineReport(directory=str(tmp_path / "report"))]
    )
    events = json.loads((tmp_path / "report" / "timeline.json").read_text())["traceEvents"]
    actions = [str(a) for stage in OneForwardOneBackward().actions(2, 1, 4) for a in stage]
    assert sorted(event["name"] for event in events if event["pid"] == "measured") == sorted(actions)
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events)
    assert (tmp_path / "report" / "timeline.png").stat().st_size > 1000


def test_pipelines_average_their_gradients(tmp_path):
    """Two pipelines of two stages, against two workers of DDP; Lightning places the samplers of both."""
    make = lambda: Language(ordered=False)  # noqa: E731
    options = {"gradient_clip_val": 0.1, "max_steps": 4}
    wanted, losses, metrics = forked(make(), ddp(2), tmp_path / "ddp", **options)
    found, found_losses, found_metrics = forked(make(), pipeline(4, stages=2), tmp_path / "pipeline", **options)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-8
    assert found_metrics == pytest.approx(metrics, rel=1e-6)


class Overflow(Language):
    """The loss of the last worker's batches overflows in the second step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        sick = self.trainer.world_size in (1, 2) or self.global_rank >= 2
        return loss * torch.inf if batch_idx == 1 and sick else loss


class LeaveOut(Callback):
    """No update where a gradient isn't finite."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if not all(bool(g.isfinite().all()) for g in gradients):
            optimizer.zero_grad()


def test_a_step_with_infinite_gradients_is_skipped_by_all_stages_of_all_pipelines(tmp_path):
    """Two pipelines of two stages, one with an infinite loss, against two workers of DDP."""
    options = {"max_steps": 3}
    wanted, *_ = forked(Overflow(ordered=False), ddp(2), tmp_path / "ddp", callbacks=[LeaveOut()], **options)
    how = pipeline(4, stages=2, nonfinite="skip")
    found, *_ = forked(Overflow(ordered=False), how, tmp_path / "pipeline", **options)
    assert all(bool(t.isfinite().all()) for t in found.values())
    assert distance(found, wanted) < 1e-8


def test_a_step_with_infinite_gradients_stops_all_stages(tmp_path):
    with pytest.raises(RuntimeError, match="FloatingPointError: the gradients hold NaN or infinity on all workers"):
        forked(Overflow(), pipeline(2), tmp_path / "pipeline")


def evaluated(how):
    """(metrics of validate, of test, predictions)."""
    trainer = Trainer(**{**QUIET, **how})
    module = Language()
    (validated,) = trainer.validate(module, verbose=False)
    (tested,) = trainer.test(module, verbose=False)
    return validated, tested, torch.cat(trainer.predict(module)) if how["devices"] == 1 else None


def test_validate_and_test(tmp_path):
    *wanted, _ = evaluated(alone())
    *found, _ = in_processes(evaluated, pipeline(3))
    for theirs, ours in zip(wanted, found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def predicted(folder, how):
    class Keep(Language):
        def predict_step(self, batch, batch_idx):
            rows = super().predict_step(batch, batch_idx)
            torch.save(rows, folder / f"{self.global_rank}-{batch_idx}.pt")
            return rows

    Trainer(**{**QUIET, **how}).predict(Keep(), return_predictions=False)


def test_predict(tmp_path):
    for name in ("alone", "pipeline"):
        (tmp_path / name).mkdir()
    predicted(tmp_path / "alone", alone())
    in_processes(predicted, tmp_path / "pipeline", pipeline(2))
    for batch in range(2):
        wanted = torch.load(tmp_path / "alone" / f"0-{batch}.pt")
        for stage in range(2):
            assert torch.equal(torch.load(tmp_path / "pipeline" / f"{stage}-{batch}.pt"), wanted)


class OneNumber(LightningModule):
    """A model whose output is one number a sample, without a dimension for it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))

    def pipeline_stages(self):
        return Chain(self.net, blocks_of(list(self.net)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def one_number(how):
    data = DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)
    trainer = Trainer(**{**QUIET, "use_distributed_sampler": False, "max_steps": 2, **how})
    trainer.fit(module := OneNumber(), data)
    (row,) = trainer.validate(module, data, verbose=False)
    return torch.cat([p.detach().flatten() for p in module.parameters()]), row["val/mean"]


@pytest.mark.parametrize("stages", [1, 2])
def test_an_output_may_be_one_number_a_sample(stages):
    (wanted, mean), (found, ours) = (
        in_processes(one_number, how) for how in (alone(), pipeline(stages, slicing=Uniform(1)))
    )
    assert torch.allclose(found, wanted, atol=1e-6)
    assert ours == pytest.approx(mean, abs=1e-6)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def saving(folder, every=3):
    return {
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)],
    }


def test_checkpoint_is_what_one_process_would_have_written(tmp_path):
    fit(Language(scheduler=True), alone(), tmp_path / "a", **saving(tmp_path / "a"))
    forked(Language(scheduler=True), pipeline(3), tmp_path / "b", **saving(tmp_path / "b"))
    wanted, found = (torch.load(tmp_path / f / "step=6.ckpt", weights_only=True) for f in "ab")
    assert set(found) - set(wanted) == {"lightning_decentral"}
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    assert distance(found["state_dict"], wanted["state_dict"]) < 1e-9
    (theirs,), (ours,) = wanted["optimizer_states"], found["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert distance(ours["state"][number], state) < 1e-7
    assert found["lr_schedulers"] == wanted["lr_schedulers"]
    assert Language.load_from_checkpoint(tmp_path / "b" / "step=6.ckpt", weights_only=True)


class AtTheEnd(Callback):
    """Saves once fit has put the module together again."""

    def __init__(self, folder):
        self._folder = folder

    def on_fit_end(self, trainer, pl_module):
        trainer.save_checkpoint(self._folder / "end.ckpt")


def test_a_checkpoint_saved_after_fit_is_whole(tmp_path):
    callbacks = [*saving(tmp_path)["callbacks"], AtTheEnd(tmp_path)]
    forked(Language(), pipeline(2), tmp_path / "a", **{**saving(tmp_path), "callbacks": callbacks})
    wanted, found = (torch.load(tmp_path / name, weights_only=True) for name in ("step=6.ckpt", "end.ckpt"))
    assert all(torch.equal(found["state_dict"][key], tensor) for key, tensor in wanted["state_dict"].items())
    (theirs,), (ours,) = wanted["optimizer_states"], found["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][number][key], value) for key, value in state.items())


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gpt2, tied", "llama"])
def test_resume_is_exact(tmp_path, name):
    make = lambda: Language(name, scheduler=True)  # noqa: E731
    wanted, losses, _ = forked(make(), pipeline(2), tmp_path / "a", **saving(tmp_path / "a"))
    found, found_losses, _ = forked(make(), pipeline(2), tmp_path / "b", str(tmp_path / "a" / "step=3.ckpt"))
    assert found_losses == losses[3:]
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.sampled
@pytest.mark.parametrize("devices", [1, 3, 0], ids=["one stage", "three stages", "no pipeline"])
def test_resume_with_another_number_of_stages(tmp_path, devices):
    wanted, losses, _ = fit(Language(scheduler=True), alone(), tmp_path / "alone")
    forked(Language(scheduler=True), pipeline(2), tmp_path / "a", max_steps=3, **saving(tmp_path / "a"))
    how = pipeline(devices) if devices else alone()
    found, found_losses, _ = forked(Language(scheduler=True), how, tmp_path / "b", str(tmp_path / "a" / "step=3.ckpt"))
    assert found_losses == pytest.approx(losses[3:], rel=1e-9)
    assert distance(found, wanted) < 1e-8


def test_resume_from_a_run_without_a_pipeline(tmp_path):
    wanted, losses, _ = fit(Language(), alone(), tmp_path / "alone", **saving(tmp_path / "alone"))
    checkpoint = str(tmp_path / "alone" / "step=3.ckpt")
    found, found_losses, _ = forked(Language(), pipeline(2), tmp_path / "b", checkpoint)
    assert found_losses == pytest.approx(losses[3:], rel=1e-9)
    assert distance(found, wanted) < 1e-8


# ---- what it holds, logs and says -----------------------------------------------------------------------------------


class Peek(Callback):
    """While training: what this worker has of parameters and optimizer states."""

    def __init__(self, folder):
        self._folder = folder

    def on_train_end(self, trainer, pl_module):
        held = {n: tuple(p.shape) for n, p in pl_module.named_parameters()}
        states = sum(len(optimizer.state) for optimizer in trainer.optimizers)
        torch.save((held, states), self._folder / f"{trainer.global_rank}.pt")


def test_a_stage_holds_and_optimizes_only_its_own(tmp_path):
    whole = {n: tuple(p.shape) for n, p in Language("llama").named_parameters()}
    forked(Language("llama"), pipeline(2), tmp_path / "x", callbacks=[Peek(tmp_path)])
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert {**rows[0][0], **rows[1][0]} == whole
    assert not set(rows[0][0]) & set(rows[1][0])
    assert all(states == len(held) for held, states in rows)
    assert {n for n in rows[0][0] if "embed" in n}
    assert {n for n in rows[1][0] if "lm_head" in n}


@pytest.mark.sampled
@pytest.mark.parametrize("slicing", [Planned(granularity=8, max_slices=4), Balanced(2), Uniform(4)])
def test_slices_are_planned_from_measurements(tmp_path, slicing):
    """Whatever the plan is, the training is the same."""
    make = lambda: Language("llama", length=48)  # noqa: E731
    wanted, losses, _ = fit(make(), alone(), tmp_path / "alone", max_steps=3)
    found, found_losses, _ = forked(make(), pipeline(2, slicing=slicing), tmp_path / "p", max_steps=3)
    assert found_losses == pytest.approx(losses, rel=1e-10)
    assert distance(found, wanted) < 1e-9


@pytest.mark.parametrize(("slices", "microbatches", "lines"), [(1, 1, 1), (2, 1, 0), (1, 3, 0)])
def test_a_plan_that_is_no_faster_than_one_device_says_so(tmp_path, monkeypatch, slices, microbatches, lines):
    def info(text):
        with (tmp_path / "lines").open("a") as stream:
            stream.write(f"{text}\n")

    monkeypatch.setattr(stage_gradients, "rank_zero_info", info)
    options = {"slicing": Uniform(slices), "microbatches": microbatches}
    forked(Language(), pipeline(2, **options), tmp_path / "p", max_steps=2)
    found = (tmp_path / "lines").read_text()
    assert found.count("can't be faster than one device. Give strategy.microbatches=4, longer sequences") == 2 * lines


# ---- what cannot be -------------------------------------------------------------------------------------------------


class Twice(Language):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + super().training_step(batch, batch_idx)


class Never(Language):
    def training_step(self, batch, batch_idx):
        return torch.zeros((), requires_grad=True)


class Weighted(Language):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class Differing(Language):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [tensor.roll(self.global_rank, 0) for tensor in batch]


class Turning(Language):
    def training_step(self, batch, batch_idx):
        return super().training_step([tensor.roll(self.global_rank, 0) for tensor in batch], batch_idx)


class Manual(Language):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Two(Language):
    def __init__(self):
        super().__init__()
        self.other = Language("llama").model


class Dies(Language):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("this stage has had enough")
        return super().training_step(batch, batch_idx)


class Full(Language):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            next(iter(self.model.model.layers)).register_forward_pre_hook(self._fill)
        return super().training_step(batch, batch_idx)

    def _fill(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 EiB")


CASES = {
    "workers": (lambda: Language(), {"devices": 3, "stages": 2}, "3 workers aren't a multiple of stages=2"),
    "blocks": (lambda: Language(), {"devices": 5}, "5 stages for a model of 4 blocks: use 1 to 4 stages"),
    "slices": (
        lambda: Language(length=12),
        {"devices": 2},
        r"\(5, 1, 4, 3\) sum to 13, but the sequence has 12 tokens.*which replan",
    ),
    "twice": (Twice, {"devices": 2}, "called GPT2LMHeadModel twice"),
    "never": (Never, {"devices": 2}, "training_step returned without calling GPT2LMHeadModel"),
    "weighted": (
        Weighted,
        {"devices": 2, "microbatches": 3},
        "microbatches=3 needs a training_step that",
    ),
    "rows": (lambda: Language(batch=2), {"devices": 2, "microbatches": 3}, r"the batch have \[2\] rows"),
    "batches": (Differing, {"devices": 2}, "the stages of one pipeline read different batches"),
    "inputs": (
        Turning,
        {"devices": 2},
        "gives GPT2LMHeadModel different inputs on two stages",
    ),
    "manual": (Manual, {"devices": 2}, "set automatic_optimization = True"),
    "two models": (
        Two,
        {"devices": 2},
        "exactly one known model in Two, but found GPT2LMHeadModel, LlamaForCausalLM",
    ),
    "memory": (lambda: Full("llama"), {"devices": 2}, "stage 1 ran out of memory: take more slices"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_said(tmp_path, case):
    make, options, words = CASES[case]
    with pytest.raises(RuntimeError, match=words):
        forked(make(), pipeline(**options), tmp_path)


def test_a_stage_that_ends_ends_all(tmp_path):
    """Which of them speaks first is the launcher's; how the others name it, see test_executor."""
    with pytest.raises(RuntimeError, match=r"this stage has had enough|lost stage 1"):
        forked(Dies("llama"), pipeline(3), tmp_path, seconds=60)


@pytest.mark.parametrize(("options", "words"), [
    ({"stages": 0}, "stages must be at least 1, got 0"),
    ({"microbatches": 0}, "microbatches must be at least 1, got 0"),
    ({"find_unused_parameters": True}, "TokenPipelineStrategy has no option 'find_unused_parameters'"),
])  # fmt: skip
def test_options_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        TokenPipelineStrategy(**options)


@pytest.mark.parametrize("name", [f"token_pipeline{ending}" for ending in ("", "_spawn", "_fork", "_notebook")])
def test_the_name_is_enough(name):
    strategy = Trainer(**{**QUIET, "strategy": name, "devices": 2}).strategy
    assert isinstance(strategy, TokenPipelineStrategy)
    assert strategy.num_stages == 2
