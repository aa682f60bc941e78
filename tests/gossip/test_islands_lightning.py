"""Islands under what Lightning's users do: manual optimization, bad models, unequal batches, the start summary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize
from torchmetrics import MeanMetric

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import AllReduce, Auto, FullyShard, Gossip, Hypercube, Island, simulate
from lightning_decentral.gossip.mixer_builder import place
from lightning_decentral.gossip.summary import through_card
from lightning_decentral.shared.wire.fsdp import full_tensor
from tests.tiny import QUIET, Batches, Net, Record, SizedBatches, in_processes, recorded

both = pytest.mark.parametrize("island", [AllReduce(2), FullyShard(2)], ids=str)


def run(
    folder: Path,
    module: LightningModule,
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    callbacks: list[Callback],
    batches: Any = None,
    size: int = 4,
) -> Any:
    settings = {**QUIET, "max_steps": 6, **trainer_options}
    strategy = GossipStrategy(start_method="fork", **options)
    trainer = Trainer(**settings, devices=size, strategy=strategy, callbacks=callbacks)
    trainer.fit(module, batches or SizedBatches(6))
    return module.state_dict()


class Manual(Net):
    """Two optimizers; the second steps every other batch, after two backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward((self.a - self.global_rank).square().sum())
        first.step()
        if batch_idx % 2 == 0:
            second.zero_grad()
            for part in (0.5, 1.5):
                self.manual_backward(part * (self.b + self.global_rank).square().sum() / 2)
            second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.a], 0.1), torch.optim.SGD([self.b], 0.2)]


class OwnAandB(Record):
    """Only what is trained."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._rows.append(torch.cat([full_tensor(pl_module.a), full_tensor(pl_module.b)]).clone())


def test_manual_optimization_averages_every_backward(tmp_path: Path) -> None:
    options = {"island": AllReduce(2)}
    trainer_options = {"max_steps": -1, "max_epochs": 1}
    in_processes(run, tmp_path, Manual(), options, trainer_options, [OwnAandB(tmp_path)], seconds=100)
    centre = torch.tensor([[0.5], [2.5]], dtype=torch.float64)  # of ranks (0, 1) and (2, 3)
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    a = simulate(Auto(), Gossip(), lambda x, _: 2 * (x - centre), zeros, 6, 0.1)
    b = simulate(Auto(), Gossip(), lambda x, _: 2 * (x + centre), zeros[:, :2], 3, 0.2)
    measured = recorded(tmp_path, 4)[:, ::2]
    torch.testing.assert_close(measured[:, :, :3], a[1:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(measured[:, :, 3:], b[1:].repeat_interleave(2, dim=0), rtol=1e-12, atol=1e-12)


class Wrapped(Net):
    """Sharded by the user."""

    def configure_model(self) -> None:
        fully_shard(self.head)


@pytest.mark.sampled
@pytest.mark.parametrize("island", [None, AllReduce(2), FullyShard(2)], ids=str)
def test_a_module_that_is_already_wrapped_is_refused(tmp_path: Path, island: Island | None) -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: head is already wrapped by FSDP: leave out fully_shard"):
        in_processes(run, tmp_path, Wrapped(), {"island": island}, {}, [])


class Mixed(Net):
    """A layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.half_layer = nn.Linear(2, 2).half()


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def test_what_shards_can_not_do_is_refused(tmp_path: Path) -> None:
    options = {"island": FullyShard(2)}
    with pytest.raises(RuntimeError, match=r"ValueError: FullyShard.* shards complex parameters, .*: keep real pairs"):
        in_processes(run, tmp_path, Complex(), options, {}, [])
    with pytest.raises(RuntimeError, match=r"EMAWeightAveraging copies whole models.*: use AllReduce"):
        in_processes(run, tmp_path, Net(), options, {}, [EMAWeightAveraging(decay=0.5)])
    with pytest.raises(RuntimeError, match=r"ModelPruning masks whole parameters.*: use AllReduce"):
        in_processes(run, tmp_path, Net(), options, {}, [ModelPruning("l1_unstructured", amount=0.5)])
    with pytest.raises(
        RuntimeError, match=r"needs parameters of one type, got torch.float16 and torch.float32: convert"
    ):
        in_processes(run, tmp_path, Mixed(), options, {}, [])
    with pytest.raises(RuntimeError, match=r"manual optimization runs the backward inside.*: use AllReduce"):
        in_processes(run, tmp_path, Manual(), options, {}, [])
    scaled = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    with pytest.raises(RuntimeError, match=r"precision 16-mixed scales the loss.*: use bf16-mixed"):
        in_processes(run, tmp_path, Net(), options, scaled, [])


class Parametrized(Callback):
    """Gives a layer another parameter after the first step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            parametrize.register_parametrization(pl_module.head, "bias", nn.Identity())


def test_a_parameter_that_comes_while_training_is_refused_under_shards(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"head.parametrizations.bias.original was added during training.*AllReduce"):
        in_processes(run, tmp_path, Net(), {"island": FullyShard(2)}, {}, [Parametrized()])


class Copies(Net):
    """Counts what the backward of one step keeps in bf16 that has the shape of a block's weight and is a copy of it."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[:, :8]
        return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.bfloat16 and {*tensor.shape} == {8, 24}:
                seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = super().training_step(batch, batch_idx)
        # FSDP has given up what it gathered: only a copy still has memory of its own.
        self.kept.append(sum(tensor.untyped_storage().nbytes() > 0 for tensor in seen))
        return loss


class Kept(Callback):
    """Each worker's counts, and its last loss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        row = pl_module.kept, float(trainer.callback_metrics["train_loss"])
        torch.save(row, self._folder / f"kept-{trainer.global_rank}.pt")


def kept(folder: Path, island: Island) -> tuple[list[int], float]:
    folder.mkdir()
    in_processes(run, folder, Copies(), {"island": island}, {"precision": "bf16-mixed"}, [Kept(folder)], None, 2)
    counts, loss = torch.load(folder / "kept-0.pt")
    return counts, loss


def test_no_copy_in_bf16_is_kept_until_the_backward(tmp_path: Path) -> None:
    copies, expected = kept(tmp_path / "autocast", FullyShard(2))
    none, loss = kept(tmp_path / "gathered", FullyShard(2, param_dtype="bfloat16"))
    assert copies == [1] * 6, "of the second block: the first has no gradient to pass on"
    assert none == [0] * 6
    assert loss == pytest.approx(expected, rel=0.05)


def test_bf16_that_a_module_could_not_compute_in_is_refused(tmp_path: Path) -> None:
    island = {"island": FullyShard(2, param_dtype="bfloat16")}
    with pytest.raises(RuntimeError, match=r"got precision=32-true: use precision='bf16-mixed', or leave"):
        in_processes(run, tmp_path, Copies(), island, {}, [], None, 2)
    with pytest.raises(RuntimeError, match=r"BatchNorm computes in float32.*: leave param_dtype out"):
        in_processes(run, tmp_path, Net(), island, {"precision": "bf16-mixed"}, [], None, 2)
    with pytest.raises(ValueError, match=r'must be "bfloat16" or None, got \'half\''):
        FullyShard(2, param_dtype="half")


@pytest.mark.sampled
@both
def test_unequal_numbers_of_batches_inside_an_island_end_with_the_remedy(tmp_path: Path, island: Island) -> None:
    """Those who still train wait for the gradients of one that has ended; nobody hangs."""
    batches = Batches(lengths=(3, 5, 5, 5))
    with pytest.raises(RuntimeError, match=r"give every worker the same number of batches|lost"):
        in_processes(run, tmp_path, Net(), {"island": island}, {"max_steps": -1, "max_epochs": 1}, [], batches)


def test_a_loss_scaler_skips_the_same_steps_on_all_devices_of_an_island(tmp_path: Path) -> None:
    """Gradients are averaged scaled: where one overflows, the mean does."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    in_processes(run, tmp_path, Net(dropout=0.0), {"island": AllReduce(2)}, {"plugins": [plugin]}, [Record(tmp_path)])
    rows = recorded(tmp_path, 4)
    assert torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(rows[:, 2], rows[:, 3])
    assert not torch.equal(rows[:, 0], rows[:, 2])
    assert bool(torch.isfinite(rows).all())


@pytest.mark.sampled
@both
def test_a_second_fit_goes_on_from_the_mean_in_a_plain_module(tmp_path: Path, island: Island) -> None:
    in_processes(fit_twice, island, seconds=100)


class Measured(Net):
    """With a metric, whose hash is another one behind each reset."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.reset()
        self.mean.update(loss.detach())
        return loss


def fit_twice(island: Island) -> None:
    """In processes that outlive a fit: Lightning forks them for each."""

    class Checks(Callback):
        def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            assert type(pl_module) is Measured, type(pl_module)
            assert pl_module.mean.update_called
            assert {type(p) for p in pl_module.parameters()} == {nn.Parameter}
            assert pl_module.second.weight is pl_module.first.weight
            assert not pl_module.frozen.weight.requires_grad
            assert not pl_module._forward_pre_hooks
            assert not pl_module._state_dict_pre_hooks
            pl_module(torch.zeros(4, 8))

    module = Measured()
    for _ in range(2):
        before = {k: v.clone() for k, v in module.state_dict().items()}
        run(Path(), module, {"island": island}, {}, [Checks()])
        assert not torch.equal(module.head.weight, before["head.weight"])


@pytest.mark.parametrize(
    ("nodes", "per_node", "options", "said"),
    [
        (1, 4, {}, "none, there is one node"),
        (2, 4, {}, "875 a step, at most 1,750 (all-reduce: 1,750)"),
        (4, 1, {}, "1,000 a step, at most 1,000 (all-reduce: 1,500)"),
        (2, 4, {"topology": Hypercube()}, "1,333 a step, at most 4,000 (all-reduce: 1,750)"),
        (4, 4, {"island": AllReduce(4)}, "1,000 a step, at most 1,000 (all-reduce: 1,875)"),
        (2, 4, {"island": FullyShard(4)}, "1,000 a step, at most 1,000 (all-reduce: 1,750)"),
        (2, 8, {"island": AllReduce(4)}, "750 a step, at most 1,500 (all-reduce: 1,875)"),
    ],
)
def test_the_summary_says_what_passes_the_network_card(
    nodes: int, per_node: int, options: dict[str, Any], said: str
) -> None:
    strategy = GossipStrategy(**options)
    strategy.parallel_devices = [torch.device("cpu")] * per_node
    strategy.num_nodes = nodes
    place(strategy, strategy.workers_per_node, strategy.workers)
    assert through_card(strategy, 1000, 1000) == said


def test_counters_and_rounds_of_each_device(tmp_path: Path) -> None:
    """Bytes through a worker's card do not depend on what the island is made of."""
    sent = {}
    for island in (AllReduce(2), FullyShard(2)):
        in_processes(run, tmp_path, Net(), {"island": island}, {}, [Counters(tmp_path)])
        sent[type(island)] = [torch.load(tmp_path / f"traffic-{rank}.pt") for rank in range(4)]
    for rows in sent.values():
        assert [row["rounds"] for row in rows] == [6] * 4
        assert len({row["bytes"] for row in rows}) == 1
        # An island's devices together send what the plan says of a worker, and rows of 24 bytes about it.
        said, of_parameters = rows[0]["said"].split(" ", 1)
        sent = sum(row["bytes"] for row in rows[:2]) / 6
        assert 0 < sent - float(said.replace(",", "")) <= 2 * 24 * rows[0]["buckets"]
        assert of_parameters == "(1 x the parameters)"


class Counters(Callback):
    """Traffic of each device at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        row = {
            "bytes": strategy.traffic().bytes_sent,
            "rounds": strategy.rounds()[0],
            "buckets": len(strategy.buckets),
            "said": strategy.summary()["bytes per worker and step"],
        }
        torch.save(row, self._folder / f"traffic-{trainer.global_rank}.pt")


class Totals(Callback):
    """What a hook reads of sharded gradients, and the same of whole ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, _: Any) -> None:
        named = [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
        found = grad_norm(pl_module, 2)
        read = [float(sum(g.square().sum() for _, g in named)), max(float(g.max()) for _, g in named)]
        whole = [(name, full_tensor(g)) for name, g in named]
        wanted = [float(sum(g.square().sum() for _, g in whole)), max(float(g.max()) for _, g in whole)]
        norms = [float(found[f"grad_2.0_norm/{name}"]) for name, _ in named]
        rows = (
            [*read, float(found["grad_2.0_norm_total"]), *norms],
            [*wanted, wanted[0] ** 0.5, *(float(g.norm()) for _, g in whole)],
        )
        torch.save(rows, self._folder / f"totals.{trainer.global_rank}")


def test_totals_that_hooks_read_off_shards_are_of_the_whole_model(tmp_path: Path) -> None:
    in_processes(run, tmp_path, Net(), {"island": FullyShard(2)}, {"max_steps": 1}, [Totals(tmp_path)], None, 2)
    rows = [torch.load(tmp_path / f"totals.{rank}") for rank in range(2)]
    assert rows[0][0] == pytest.approx(rows[0][1], rel=1e-5)
    assert rows[1][0] == pytest.approx(rows[0][0], rel=1e-6)


class Ends(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # On worker 0 alone, which warns: another that ended first would end it, too.
        if self.global_step == 2 and self.global_rank == 0:
            raise OSError("the user's own")
        return super().training_step(batch, batch_idx)


def test_a_save_on_the_way_out_of_shards_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="OSError: the user's own") as found:
        in_processes(
            run,
            tmp_path,
            Ends(),
            {"island": FullyShard(2)},
            {"enable_checkpointing": True},
            [OnExceptionCheckpoint(tmp_path, "last")],
        )
    assert "after an exception the devices of a worker can't communicate any more" in str(found.value)
    assert not (tmp_path / "last.ckpt").exists()


class Masked(Net):
    """Masks its gradients by hand.

    Args:
        brought: by a shard of the mask.
    """

    def __init__(self, brought: bool) -> None:
        super().__init__(dropout=0.0)
        self.brought = brought

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight: Any = self.head.weight
        mask = (torch.arange(weight.numel()) % 2).view(weight.shape).to(weight.dtype)
        if self.brought:
            mask = distribute_tensor(mask, weight.device_mesh, weight.placements)
        weight.grad.mul_(mask)


def test_a_mask_by_hand_over_shards_ends_with_the_remedy_that_helps(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as found:
        in_processes(run, tmp_path, Masked(brought=False), {"island": FullyShard(2)}, {"max_steps": 2}, [], None, 2)
    assert "convert a mask by torch.distributed.tensor.distribute_tensor(mask" in str(found.value)
    in_processes(run, tmp_path, Masked(brought=True), {"island": FullyShard(2)}, {"max_steps": 2}, [], None, 2)
