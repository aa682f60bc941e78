"""Spilled training is the training that it replaces, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import SpilledStrategy
from lightning_decentral.spilled import strategy as strategy_module
from lightning_decentral.spilled.compute.transfer import Copies, OffloadDevice
from tests.spilled.spilling import CONFIGS, Watched, batches, dataset, fit, least_bytes, recipe, same_states, trainer
from tests.tiny import Net

ACCUMULATED = {"max_steps": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "settings"), [
    *((name, {}) for name in CONFIGS),
    *((name, {**ACCUMULATED, "precision": "bf16-mixed"}) for name in CONFIGS),
    ("gpt", {"precision": "bf16-true"}),
], ids=str)  # fmt: skip
def test_training_is_that_without_spilling(name: str, settings: dict[str, Any]) -> None:
    """Dropout on in ViT and GPT-2, whose embedding is tied; BatchNorm in ResNet; a schedule; validation."""
    strategy = Watched(memory_bytes=least_bytes(name, settings.get("precision")))
    spilled = fit(recipe(name), batches(name), strategy, **settings)
    assert same_states(spilled, fit(recipe(name), batches(name), **settings))
    assert len(strategy.plans["training"].shards) > 1
    assert set(strategy.plans) == {"training", "validation"}


class Causal(LightningModule):
    """A language model of transformers with its own settings, which pass a cache from block to block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        config = transformers.AutoConfig.for_model(name, vocab_size=16, **SHAPES[name])
        assert config.use_cache
        torch.manual_seed(0)
        self.network = transformers.AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self.network(input_ids=batch[0], labels=batch[0])
        assert isinstance(self.trainer.strategy, SpilledStrategy) == (result.past_key_values.get_seq_length() == 0)
        return cast(Tensor, result.loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The second half with the cache of the first."""
        first, second = batch[0].chunk(2, dim=1)
        cache = self.network(input_ids=first).past_key_values
        self.log("logits", self.network(input_ids=second, past_key_values=cache).logits.abs().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": {**SMALL, "num_key_value_heads": 1},
    "gpt_neox": SMALL,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
}


@pytest.mark.parametrize("name", SHAPES)
def test_models_that_pass_a_cache_train_as_without_spilling(name: str) -> None:
    """What a first run of a block wrote into the cache would hide its keys and values from their gradients."""
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randint(0, 16, (8, 8))), batch_size=2)
    runs = [fit(Causal(name), loader, strategy, max_steps=4) for strategy in (SpilledStrategy(), "auto")]
    assert same_states(*runs)


class Thawing(Callback):
    """A layer is trained from the fourth step on."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.network.classifier.requires_grad_(trainer.global_step >= 3)  # type: ignore[union-attr]


def test_what_is_trained_later_is_planned_anew() -> None:
    strategy = Watched(memory_bytes=10**9)
    spilled = fit(recipe("vit"), batches("vit"), strategy, callbacks=[Thawing()], limit_val_batches=0)
    assert same_states(spilled, fit(recipe("vit"), batches("vit"), callbacks=[Thawing()], limit_val_batches=0))
    sent = [visit.sent_bytes for visit in strategy.plans["training"].footprint.visits if visit.backward]
    assert sent[0] == 4 * (16 + 1) * 4, "the classifier's gradient"


class LateCopies(OffloadDevice):
    """Copies are made when somebody waits for them, as late as on a device; until then they are no numbers."""

    def fetch(self, hosts: Sequence[Tensor]) -> Copies:
        empty = [_nothing_like(host) for host in hosts]

        class Late(Copies):
            def ready(self) -> list[Tensor]:
                for copy, host in zip(empty, hosts, strict=True):
                    copy.copy_(host.detach())
                return empty

        return Late(empty)

    def send(self, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Copies:
        empty, sources = [_nothing_like(tensor) for tensor in tensors], list(tensors)

        class Late(Copies):
            def land(self) -> list[Tensor]:
                while sources:
                    empty[-len(sources)].copy_(sources.pop(0).detach())
                return super().land()

        return Late(empty, held=sources)


def _nothing_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, requires_grad=False)
    return empty.fill_(torch.nan) if empty.is_floating_point() else empty.zero_()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_nobody_reads_a_copy_that_he_did_not_wait_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_module, "device_of", lambda place: LateCopies())
    spilled = fit(recipe(name), batches(name), SpilledStrategy(memory_bytes=10**9))
    assert same_states(spilled, fit(recipe(name), batches(name)))


def checkpointing(reentrant: bool) -> LightningModule:
    module = recipe("vit")
    network: Any = module.network
    network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return module


class Curved(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS([p for p in self.parameters() if p.requires_grad], lr=0.1, max_iter=3)


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "settings"), [
    (lambda: Net(), {}),
    (lambda: Net(), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (lambda: checkpointing(False), {}),
    (lambda: checkpointing(True), {}),
    (lambda: Curved(), {"max_steps": 2}),
], ids=["BatchNorm, tied, frozen", "clip by value", "checkpointing", "reentrant checkpointing", "LBFGS"])  # fmt: skip
def test_other_modules_too(make: Callable[[], LightningModule], settings: dict[str, Any]) -> None:
    loader = dataset(make())
    spilled = fit(make(), loader, SpilledStrategy(), **settings)
    assert same_states(spilled, fit(make(), loader, **settings))


class Overflow(nn.Module):
    """The loss overflows at the third batch."""

    calls = 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(logits, targets) * (torch.inf if self.calls == 3 else 1)


def test_a_loss_scaler_skips_the_same_step() -> None:
    def run(strategy: Any) -> Trainer:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
        return fit(recipe("gpt", Overflow()), batches("gpt"), strategy, plugins=[plugin], gradient_clip_val=1.0)

    spilled, plain = run(SpilledStrategy()), run("auto")
    assert same_states(spilled, plain)
    scales = [r.precision_plugin.scaler.get_scale() for r in (spilled, plain)]
    assert scales == [8.0, 8.0]


def test_a_scaler_of_another_device_is_taken_to_the_host_with_its_settings() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    ours = strategy_module.host_scaler(theirs)
    assert ours.state_dict() == theirs.state_dict()
    assert ours._scale is not None
    assert ours._scale.device.type == "cpu"


# ---- evaluation and checkpoints --------------------------------------------------------------------------------------


def test_evaluation_is_that_without_spilling() -> None:
    def run(strategy: Any) -> list[Any]:
        module, ours = recipe("resnet"), trainer(strategy)
        found = [
            ours.validate(module, batches("resnet"), verbose=False),
            ours.test(module, batches("resnet"), verbose=False),
        ]
        module.predict_step = lambda batch, batch_idx: module(batch[0])  # type: ignore[method-assign]
        return [*found, ours.predict(module, batches("resnet"))]

    spilled, plain = run(SpilledStrategy(memory_bytes=10**5)), run("auto")
    assert spilled[:2] == plain[:2]
    assert all(torch.equal(a, b) for a, b in zip(spilled[2], plain[2], strict=True))


def test_checkpoints_go_both_ways_and_resume_exactly(tmp_path: Path) -> None:
    """Whoever trained before and whoever goes on: the same run."""
    settings: dict[str, Any] = {"max_steps": 6, "max_epochs": 4, "accumulate_grad_batches": 2}

    def run(first: Any, second: Any) -> Trainer:
        half = fit(recipe("gpt"), batches("gpt"), first, callbacks=[Stop(3)], **settings)
        half.save_checkpoint(tmp_path / "half.ckpt")
        assert torch.load(tmp_path / "half.ckpt", weights_only=True)["global_step"] == 3
        return fit(recipe("gpt"), batches("gpt"), second, tmp_path / "half.ckpt", **settings)

    plain = run("auto", "auto")
    for first, second in (("spilled", "auto"), ("auto", "spilled"), ("spilled", "spilled")):
        assert same_states(run(first, second), plain), (first, second)


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self._step
