"""Updates on the device, a few parameters at a time, against the plain training: bits, bytes, and what is refused."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_decentral import SpilledStrategy
from lightning_decentral.optim import AccumAdamW, Muon
from lightning_decentral.spilled import OnDevice, OnHost
from lightning_decentral.spilled import strategy as strategy_module
from lightning_decentral.spilled.compute.transfer import Counting
from lightning_decentral.spilled.compute.update import StreamedUpdate
from tests.spilled.spilling import LAYERS, WIDTH, Chain, batches, fit, least_bytes, recipe, rows, same_states
from tests.spilled.test_strategy import Curved, LateCopies, Overflow, Stop, dataset

LAYER = 4 * WIDTH * WIDTH


class Made(Chain):
    """The chain with another optimizer."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Optimizer:
        *most, last = self.parameters()
        return self._make([{"params": most}, {"params": [last], "lr": 1e-2}])


class Visits:
    """Names of how many parameters travelled together, and the most bytes that were on the stand-in meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.peaks: list[int] = []
        visit = StreamedUpdate._visit

        def watched(self_: StreamedUpdate, optimizer: Optimizer, plain: Any, together: Sequence[Tensor]) -> None:
            device = self_._device
            device.forget_peak()
            with Counting(device.ledger, {}):
                visit(self_, optimizer, plain, together)
            self.sizes.append(len(together))
            self.peaks.append(device.peak_bytes())

        monkeypatch.setattr(StreamedUpdate, "_visit", watched)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(SGD, lr=0.1),
        partial(Adam, lr=1e-3, amsgrad=True),
        partial(AdamW, lr=1e-3, foreach=True),
        partial(AccumAdamW, lr=1e-3, window=2),
        partial(Muon, lr=1e-3),
    ],
    ids=["momentum", "SGD", "Adam", "AdamW", "AccumAdamW", "Muon"],
)
def test_updates_are_those_without_spilling(make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, norms clipped before; all bytes within a budget that holds two layers or three, not six."""
    budget, visits = 20 * LAYER, Visits(monkeypatch)
    strategy = SpilledStrategy(memory_bytes=budget, update=OnDevice())
    spilled = fit(Made(make), rows(), strategy, gradient_clip_val=1e-3)
    assert same_states(spilled, fit(Made(make), rows(), gradient_clip_val=1e-3))
    assert visits.sizes[:LAYERS] == [1] * LAYERS, "the first update is measured"
    assert 1 < max(visits.sizes[LAYERS:]) <= LAYERS
    assert LAYER < max(visits.peaks) <= budget


def test_a_recipe_with_its_schedule_accumulation_and_bf16() -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}
    strategy = SpilledStrategy(memory_bytes=2 * least_bytes("gpt", "bf16-mixed"), update=OnDevice())
    spilled = fit(recipe("gpt"), batches("gpt"), strategy, max_steps=3, **settings)
    assert same_states(spilled, fit(recipe("gpt"), batches("gpt"), max_steps=3, **settings))


def test_nobody_reads_a_copy_that_he_did_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_module, "device_of", lambda place: LateCopies())
    spilled = fit(Chain(), rows(), SpilledStrategy(memory_bytes=10**9, update=OnDevice()))
    assert same_states(spilled, fit(Chain(), rows()))


def test_tensors_stay_the_very_ones() -> None:
    """Parameters, gradients and state that others hold."""
    held: list[list[int]] = []

    class Looking(Chain):
        def on_train_batch_end(self, *_: Any) -> None:
            (optimizer,) = self.trainer.optimizers
            states = [tensor for p in self.parameters() for tensor in optimizer.state[p].values()]
            held.append([t.data_ptr() for t in (*self.parameters(), *states)] + list(map(id, states)))
            assert "step" not in vars(optimizer) or vars(optimizer)["step"].__name__ != "step"

    fit(Looking(), rows(), SpilledStrategy(update=OnDevice()))
    assert len(held) == 6
    assert held[0] == held[1] == held[-1]


def test_a_loss_scaler_skips_the_same_step() -> None:
    def run(strategy: Any) -> Trainer:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
        return fit(recipe("gpt", Overflow()), batches("gpt"), strategy, plugins=[plugin], gradient_clip_val=1.0)

    assert same_states(run(SpilledStrategy(update=OnDevice())), run("auto"))


def test_training_goes_on_with_the_update_elsewhere(tmp_path: Path) -> None:
    def run(first: Any, second: Any) -> Trainer:
        half = fit(Chain(), rows(), first, callbacks=[Stop(3)])
        half.save_checkpoint(tmp_path / "half.ckpt")
        return fit(Chain(), rows(), second, tmp_path / "half.ckpt", max_epochs=4)

    plain = run("auto", "auto")
    on_device, on_host = (lambda: SpilledStrategy(update=OnDevice())), (lambda: SpilledStrategy(update=OnHost()))
    assert same_states(run(on_device(), on_host()), plain)
    assert same_states(run("auto", on_device()), plain)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Counted(SGD):
    """Remembers something of all parameters."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["taken"] = self.param_groups[0].get("taken", 0) + 1
        return super().step(closure)


class Noisy(SGD):
    """Draws numbers."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


def test_trying_draws_no_numbers_and_leaves_no_state() -> None:
    """Langevin's noise is the same; so is the order of the state."""
    spilled = fit(Made(partial(Noisy, lr=0.1, momentum=0.5)), rows(), SpilledStrategy(update=OnDevice()))
    assert same_states(spilled, fit(Made(partial(Noisy, lr=0.1, momentum=0.5)), rows()))


class Unit(SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


class Nested(SGD):
    """Keeps tensors in a list."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["past"] = [parameter.grad]
        return loss


@pytest.mark.parametrize(
    ("module", "budget", "message"),
    [
        (lambda: Curved(), None, r"LBFGS evaluates the loss within its step.*update on the host \(update=OnHost"),
        (lambda: Made(partial(Counted, lr=0.1)), None, "Counted keeps 'taken' for all parameters of a group"),
        (lambda: Made(partial(Unit, lr=0.1)), None, "Unit updates a parameter using others"),
        (lambda: Made(partial(Nested, lr=0.1)), None, "the optimizer's 'past' contains tensors"),
        (lambda: Chain(), 5 * LAYER, r"parameter layers.0.weight needs \d+ bytes for an update on the device"),
    ],
    ids=["LBFGS", "groups", "norm of all", "lists", "budget"],
)
def test_what_cant_travel_is_refused(module: Callable[[], LightningModule], budget: int | None, message: str) -> None:
    made = module()
    loader = rows() if isinstance(made, Chain) else dataset(made)
    with pytest.raises(ValueError, match=message):
        fit(made, loader, SpilledStrategy(memory_bytes=budget, update=OnDevice()))
    assert all(p.device.type == "cpu" and not torch.isnan(p).any() for p in made.parameters())


def test_the_least_bytes_are_named_and_are_enough() -> None:
    with pytest.raises(ValueError, match="needs") as error:
        fit(Chain(), rows(), SpilledStrategy(memory_bytes=5 * LAYER, update=OnDevice()))
    least = int(str(error.value).partition("give at least ")[2].partition(",")[0])
    assert 4 * LAYER < least < 8 * LAYER
    spilled = fit(Chain(), rows(), SpilledStrategy(memory_bytes=least, update=OnDevice()))
    assert same_states(spilled, fit(Chain(), rows()))
    with pytest.raises(ValueError, match=r"layers\.0\.weight needs"):
        fit(Chain(), rows(), SpilledStrategy(memory_bytes=least - 1, update=OnDevice()))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_on_a_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters lie where the optimizer wants them, the rest comes and goes; all within the budget."""
    make = partial(Adam, lr=1e-3, **options)
    # cuBLAS takes 32 MiB for each stream and thread that multiplies, a hundred times the budget.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = torch.cuda.memory_allocated() + 20 * LAYER  # others' tables stay
    strategy = SpilledStrategy(memory_bytes=budget, update=OnDevice())
    spilled = fit(Made(make), rows(), strategy, accelerator="gpu")
    assert torch.cuda.max_memory_allocated() <= budget
    plain = fit(Made(make), rows(), accelerator="gpu")
    for one, other in zip(spilled.lightning_module.parameters(), plain.lightning_module.parameters(), strict=True):
        assert one.device.type == "cpu"
        nn.Module.to(plain.lightning_module, "cpu")
        torch.testing.assert_close(one, other.cpu(), rtol=1e-4, atol=1e-5)
