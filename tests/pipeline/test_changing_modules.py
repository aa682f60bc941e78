"""Modules that a forward changes: whole in one slice, refused in several, where each would meet another model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations

from lightning_decentral.pipeline import Recompute, Uniform
from tests.pipeline.compute.test_adapters import Perceptron
from tests.pipeline.training import Language, alone, distance, fit, forked, pipeline

SHORT: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 0}  # observers would see a validation, too
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def observed(blocks: nn.Module) -> None:
    """Fake quantization of every linear map, with observers at work."""
    average = quantization.MovingAverageMinMaxObserver
    weights = {"dtype": torch.qint8, "quant_min": -128, "quant_max": 127}
    blocks.qconfig = quantization.QConfig(
        activation=quantization.FakeQuantize.with_args(observer=average),
        weight=quantization.FakeQuantize.with_args(observer=average, **weights),
    )
    quantization.prepare_qat(blocks.train(), inplace=True)


def normed(blocks: nn.Module) -> None:
    for block in blocks:
        parametrizations.spectral_norm(block.mlp.up_proj)


class Changing(Language):
    def __init__(self, change: Any) -> None:
        super().__init__("llama")
        change(self.model.model.layers)
        self.double()


class Fixed(Changing):
    """Ranges from a forward before the fit."""

    def __init__(self) -> None:
        super().__init__(observed)
        self.model(next(iter(self.train_dataloader()))[0])
        self.model.apply(quantization.disable_observer)


class Quantized(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        observed(self.model)
        self.double()


@pytest.mark.parametrize("change", [observed, normed])
def test_slices_of_a_changing_model_are_refused_by_name(change: Any, tmp_path: Path) -> None:
    words = r"every forward changes model\.layers\.\d\.\S+ .*, so slices .*: train with slicing=Uniform\(1\), or freeze"
    with pytest.raises(RuntimeError, match=words):
        forked(Changing(change), pipeline(2), tmp_path, **SHORT)


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "options"), [
    (lambda: Changing(observed), {"slicing": Uniform(1)}),
    (Fixed, {}),
    (Quantized, {"slicing": None}),
], ids=["one slice", "fixed before", "a chain"])  # fmt: skip
def test_otherwise_training_is_that_of_one_process(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    wanted, losses, _ = fit(make(), alone(), tmp_path / "alone", **SHORT)
    found, found_losses, _ = forked(make(), pipeline(2, **options), tmp_path / "pipeline", **SHORT)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    finite = [name for name, value in wanted.items() if value.is_floating_point() and value.isfinite().all()]
    assert distance({name: found[name] for name in finite}, {name: wanted[name] for name in finite}) < 1e-8
    assert any(name.endswith("fake_quant.scale") for name in finite)


def test_recomputation_of_a_changing_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"every forward changes .* a forward and its recomputation .*Keep\(\)"):
        forked(Quantized(), pipeline(2, slicing=None, activations=Recompute()), tmp_path, **SHORT)
