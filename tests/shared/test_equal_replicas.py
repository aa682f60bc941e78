"""Strategies whose replicas stay equal give every hook, and every parameter, what `ddp` gives it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import AllReduce
from lightning_decentral.partial import Full
from lightning_decentral.shared.compute.codec import Plain
from lightning_decentral.shared.wire.averaging.equal_replicas import RunningBuffers
from tests.tiny import QUIET, Net, SizedBatches, in_processes

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "compressed": lambda: CompressedStrategy(codec=Plain(), start_method="fork"),
    "partial": lambda: PartialBackpropStrategy(depth=Full(), start_method="fork"),
    "allreduce": lambda: GossipStrategy(island=AllReduce(devices=2), start_method="fork"),
}


class Hooked(LightningModule):
    """Every hook of a step records the gradients it sees, and changes them."""

    def __init__(self, kind: torch.dtype = torch.complex64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())))
        self.last = nn.Parameter(torch.randn(4, 4, dtype=kind))
        self.seen: list[tuple[str, Tensor]] = []

    def on_fit_start(self) -> None:
        first, last = self.net[0].weight, self.net[4].weight
        first.register_hook(lambda gradient: 2 * gradient)
        self.on_train_batch_start = partial(self.late_hooks, last)  # type: ignore[assignment]

    def late_hooks(self, parameter: nn.Parameter, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # behind the strategy's own
            parameter.register_post_accumulate_grad_hook(halve)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        g = torch.Generator().manual_seed(10 * batch_idx + self.global_rank)
        x, y = torch.randn(6, 4, generator=g), torch.randint(4, (6,), generator=g)
        return cross_entropy((self.net(x).to(self.last.dtype) @ self.last).abs(), y)

    def see(self, hook: str, factor: float = 1.0) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if grads:
            self.seen.append((hook, torch.cat([torch.view_as_real(g + 0j).flatten() for g in grads])))
        for grad in grads:
            grad.mul_(factor)

    def on_before_backward(self, loss: Tensor) -> None:
        self.see("on_before_backward")

    def on_after_backward(self) -> None:
        self.see("on_after_backward", 1.5)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.see("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see("on_before_optimizer_step", 0.5)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.see("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.see("optimizer_step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        parameters = [torch.view_as_real(p.detach() + 0j).flatten() for p in self.parameters()]
        self.seen.append(("parameters", torch.cat(parameters)))
        torch.save(self.seen, f"{self.folder}/{self.global_rank}.pt")

    folder = ""


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Gathering(Hooked):
    """A contrastive loss over what all workers embed, gathered with gradients; a step that counts and draws."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.steps, self.generator = 0, torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        g = torch.Generator().manual_seed(10 * batch_idx + self.global_rank)
        x = torch.randn(6, 4, generator=g) + 0.1 * torch.randn(6, 4, generator=self.generator) + 0.1 * self.steps
        mine = self.net(x) @ self.last
        every = self.all_gather(mine, sync_grads=True).flatten(0, 1)
        return cross_entropy(mine @ every.T, torch.arange(6) + 6 * self.global_rank)


def fitted(module: Hooked, make: Callable[[], Strategy], settings: dict[str, Any], folder: Path) -> None:
    module.folder = str(folder)
    if settings.get("plugins") == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        settings = {**settings, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    Trainer(**{**QUIET, **settings}, devices=2, max_steps=3, strategy=make()).fit(module, SizedBatches(8))


def compared(tmp_path: Path, module: Callable[[], Hooked], name: str, settings: dict[str, Any]) -> None:
    rows = {}
    for who, make in {"ddp": lambda: DDPStrategy(start_method="fork"), name: STRATEGIES[name]}.items():
        folder = tmp_path / who
        folder.mkdir()
        in_processes(fitted, module(), make, settings, folder)
        rows[who] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for mine, theirs in zip(rows[name], rows["ddp"], strict=True):
        assert [hook for hook, _ in mine] == [hook for hook, _ in theirs]
        for (hook, value), (_, reference) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(value, reference, rtol=2e-4, atol=2e-6, msg=lambda text, h=hook: f"{h}: {text}")


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"plugins": "scaler"}], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_hook_sees_and_changes_what_it_does_under_ddp(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    # No scaler of torch's serves complex numbers.
    compared(tmp_path, partial(Hooked, torch.float32 if "plugins" in settings else torch.complex64), name, settings)


@pytest.mark.parametrize("name", ["partial"])
def test_a_step_may_gather_count_and_draw(tmp_path: Path, name: str) -> None:
    compared(tmp_path, Gathering, name, {})


class Failing(Hooked):
    """Fails in its third step, on these workers."""

    def __init__(self, workers: Sequence[int]) -> None:
        super().__init__(torch.float32)
        self.workers = workers

    def late_hooks(self, parameter: nn.Parameter, batch: Any, batch_idx: int) -> None:
        """None, which a resumed run would lack."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2 and self.global_rank in self.workers:
            raise OSError("the user's own")
        return super().training_step(batch, batch_idx)


def saved_on_the_way_out(make: Callable[[], Strategy], workers: Sequence[int], folder: Path) -> tuple[str, list[str]]:
    words = {**QUIET, "enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(folder)]}
    trainer = Trainer(**words, devices=2, strategy=make())
    try:
        trainer.fit(Failing(workers), SizedBatches(4))
    except Exception as error:
        return str(error), [path.name for path in folder.iterdir()]
    return "", []


def trained(make: Callable[[], Strategy], steps: int, start: Path | None = None) -> dict[str, Tensor]:
    module = Failing(())
    Trainer(**QUIET, devices=2, strategy=make(), max_steps=steps).fit(module, SizedBatches(4), ckpt_path=start)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_save_on_the_way_out_has_what_was_trained_and_hides_no_error(
    tmp_path: Path, name: str, workers: Sequence[int]
) -> None:
    """Not what the process has that forked the workers, which was never trained; and training goes on from it."""
    error, files = in_processes(saved_on_the_way_out, STRATEGIES[name], workers, tmp_path)
    assert "OSError: the user's own" in error
    assert files == ["on_exception.ckpt"]
    saved = torch.load(tmp_path / files[0], weights_only=False)
    assert saved["global_step"] == 2
    assert all(map(torch.equal, saved["state_dict"].values(), in_processes(trained, STRATEGIES[name], 2).values()))
    ends = [in_processes(trained, STRATEGIES[name], 3, start) for start in (tmp_path / files[0], None)]
    assert all(map(torch.equal, *(end.values() for end in ends)))


def train_with_watched_buffers(make: Callable[[], Strategy]) -> None:
    strategy, share, calls = make(), RunningBuffers.share, [0]

    def watched(self: RunningBuffers, look: bool) -> None:
        calls[0] += 1
        assert strategy.wanted() == [calls[0]]  # type: ignore[attr-defined]
        share(self, look)

    RunningBuffers.share = watched  # type: ignore[method-assign]
    Trainer(**QUIET, devices=2, max_steps=3, strategy=strategy).fit(Hooked(torch.float32), SizedBatches(3))


@pytest.mark.parametrize("name", ["compressed", "partial"])
def test_who_waits_for_buffers_waits_for_this_update(name: str) -> None:
    """Else another, whose epoch has ended, would take the wait for one in the next update."""
    in_processes(train_with_watched_buffers, STRATEGIES[name])


class OwnPlateau(Net):
    """The rate follows a value of this worker's own."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}

    def on_train_epoch_end(self) -> None:
        self.log("own", float((2 * self.global_rank - 1) * self.global_step))


def fit_own_rates(name: str) -> None:
    trainer = Trainer(**QUIET, max_epochs=3, limit_train_batches=2, devices=2, strategy=STRATEGIES[name]())
    trainer.fit(OwnPlateau(dropout=0.0), SizedBatches(2))


@pytest.mark.parametrize("name", ["compressed", "allreduce"])
def test_a_rate_of_one_worker_alone_is_named(name: str) -> None:
    words = "RuntimeError: worker 1 has lr of group 0 of optimizer 0 0.025 where worker 0 has .* 0.1, and"
    with pytest.raises(RuntimeError, match=words):
        in_processes(fit_own_rates, name)
