"""What edits parameters or buffers between steps: fake quantization, parametrizations, what callbacks put back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn.utils import parametrizations

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from tests.gossip.test_lightning import Inspect, seen
from tests.tiny import QUIET, Net, SizedBatches, in_processes

SIZE = 2
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "gossip": GossipStrategy,
    "compressed": CompressedStrategy,
    "partial_backprop": partial(PartialBackpropStrategy, cuts=["second"]),
}


def fit(
    folder: Path,
    make: Callable[[], LightningModule],
    strategy: str,
    *callbacks: Callback,
    epochs: int = 2,
    **options: Any,
) -> None:
    saved = ModelCheckpoint(folder, "saved")
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 1, "max_epochs": epochs}
    trainer = Trainer(
        **settings,
        devices=SIZE,
        strategy=STRATEGIES[strategy](start_method="fork"),
        callbacks=[saved, *callbacks, Inspect(folder)],
    )
    trainer.fit(make(), SizedBatches(4), SizedBatches(1), **options)


class SwappedIn(Callback):
    """Evaluates other parameters than those that are trained, as callbacks with averages of their own do."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._own = [parameter.detach().clone() for parameter in pl_module.parameters()]
        _fill(pl_module, [torch.full_like(own, 0.01) for own in self._own])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _fill(pl_module, self._own)


@torch.no_grad()
def _fill(module: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(module.parameters(), values, strict=True):
        parameter.copy_(value)


def test_what_a_callback_swaps_in_for_a_validation_leaves_no_trace(tmp_path: Path) -> None:
    plain, swapped = tmp_path / "plain", tmp_path / "swapped"
    for folder, callbacks in ((plain, []), (swapped, [SwappedIn()])):
        folder.mkdir()
        in_processes(fit, folder, partial(Net, dropout=0.0), "gossip", *callbacks)
    for one, other in zip(seen(plain, SIZE), seen(swapped, SIZE), strict=True):
        trained = [name for name in one["own"] if "running" not in name]
        assert all(torch.equal(one["own"][name], other["own"][name]) for name in trained)
    own = [worker["own"]["head.weight"] for worker in seen(plain, SIZE)]
    assert not torch.equal(*own), "no mean was ever shown"


class Quantized(Net):
    """Every linear layer fake-quantized; what the observers have seen is fixed after the first epoch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.second = nn.Linear(8, 8)
        per_channel = quantization.MovingAveragePerChannelMinMaxObserver
        signed = {"dtype": torch.qint8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_channel_symmetric}
        self.qconfig = quantization.QConfig(
            activation=quantization.FakeQuantize.with_args(observer=quantization.MovingAverageMinMaxObserver),
            weight=quantization.FakeQuantize.with_args(observer=per_channel, **signed),
        )
        quantization.prepare_qat(self.train(), inplace=True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.apply(quantization.disable_observer)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fake_quantization_trains_is_saved_and_resumed(strategy: str, tmp_path: Path) -> None:
    in_processes(fit, tmp_path, Quantized, strategy)
    states = [worker["own"] for worker in seen(tmp_path, SIZE)]
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    (name,) = (name for name in saved if name == "head.activation_post_process.scale")
    scales = torch.stack([state[name] for state in states])
    # Each worker has ranges of its own under gossip, as it has statistics of batches; elsewhere worker 0's.
    assert torch.equal(scales[0], scales[1]) == (strategy != "gossip")
    torch.testing.assert_close(saved[name], scales.mean(0))
    assert float(saved["head.weight_fake_quant.scale"].min()) > 0
    in_processes(longer, tmp_path, strategy)
    assert seen(tmp_path, SIZE)[0]["steps"] == 12


def longer(folder: Path, strategy: str) -> None:
    fit(folder, Quantized, strategy, epochs=3, ckpt_path=str(folder / "saved.ckpt"))


class Normed(Net):
    """Two parametrizations: one with buffers of its own, one with two parameters for one."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.second = nn.Linear(8, 8)
        parametrizations.spectral_norm(self.second)
        parametrizations.weight_norm(self.head)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parametrizations_are_trained(strategy: str, tmp_path: Path) -> None:
    in_processes(fit, tmp_path, Normed, strategy)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    mean = {
        name: torch.stack([worker["own"][name].double() for worker in seen(tmp_path, SIZE)]).mean(0) for name in saved
    }
    names = [name for name in saved if "parametrizations" in name]
    assert len(names) == 5
    for name in names:
        torch.testing.assert_close(saved[name].double(), mean[name], atol=2e-2, rtol=0.0)
    plain = Normed()
    plain.load_state_dict(saved)
    # What a spectral norm is for: the largest singular value is 1, up to the few power iterations of a short run.
    assert float(torch.linalg.matrix_norm(plain.eval().second.weight, 2)) == pytest.approx(1.0, abs=0.2)
