"""The profile of one device: on a clock that the blocks themselves move, exactly; on the real one, roughly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_decentral.cli import profile as command
from lightning_decentral.cli.profile import StepProfile, profile, shown
from lightning_decentral.partial.compute.search import joints
from lightning_decentral.planner.block_profile import REPEATS, WARM_UP, measure_blocks
from lightning_decentral.recipes import command as cli
from lightning_decentral.recipes.train import build_model
from lightning_decentral.shared.compute import block_cost as blocks
from lightning_decentral.shared.compute import hardware as stopwatch
from lightning_decentral.shared.plan.profile import read
from tests.clocks import Clock
from tests.conf.test_compose import composed

BATCH, WIDTH = 4, 8


class Works(torch.autograd.Function):
    """x, after so many seconds there and so many back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        Clock.now += there
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        Clock.now += ctx.back
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, there: float, back: float, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.seconds = there, back

    def forward(self, x: Tensor) -> Tensor:
        return Works.apply(self.linear(x), *self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Tower(nn.Module):
    """Embedding, three layers, a norm behind them, a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList([Layer(1, 10), Layer(2, 20), Layer(3, 30)])
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(self.norm(x) @ self.embedding.weight.T, -1).square().sum()


class Slow(torch.optim.SGD):
    """0.001 seconds an update and one for every 100 numbers."""

    def step(self, closure: Any = None) -> Any:
        Clock.now += 0.001 + sum(p.numel() / 100 for g in self.param_groups for p in g["params"] if p.grad is not None)
        return super().step(closure)


TOKENS = torch.arange(BATCH) % 5
JOINTS = ("layers.0", "layers.1", "layers.2", "norm")


def runs(net: nn.Module) -> Any:
    return lambda: net(TOKENS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stopwatch, blocks):
        monkeypatch.setattr(module, "laps", lambda device: Clock())


def test_seconds_are_those_that_the_blocks_took(clock: None) -> None:
    tower = Tower()
    before = [p.clone() for p in tower.parameters()]
    passes: list[None] = []
    names = joints(tower, runs)
    found = measure_blocks(
        tower, names, runs(tower), [Slow(tower.parameters(), lr=1.0)], torch.device("cpu"), lambda: passes.append(None)
    )
    assert names == JOINTS
    assert [b.name for b in found] == ["inputs", *JOINTS]
    assert [b.forward_seconds for b in found] == pytest.approx([0, 1, 2, 3, 0])
    assert [b.backward_seconds for b in found] == pytest.approx([0, 10, 20, 30, 0])
    numbers = [5 * WIDTH, *[WIDTH * WIDTH + WIDTH] * 3, 2 * WIDTH]
    assert [b.parameter_bytes for b in found] == [4 * n for n in numbers], "the tied weight is ready last, unused never"
    alone = [0.001 + n / 100 for n in numbers]
    whole = 0.001 + sum(numbers) / 100
    assert [b.update_seconds for b in found] == pytest.approx([whole * a / sum(alone) for a in alone])
    assert [b.output_bytes for b in found] == [4 * BATCH * WIDTH] * 4 + [0]
    assert len(passes) == WARM_UP + REPEATS
    assert all(torch.equal(a, b) for a, b in zip(before, tower.parameters(), strict=True)), "no weight has moved"


class Around(nn.Module):
    """A chain that can't be cut: the input goes around its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self) -> Tensor:
        x = self.first(torch.ones(BATCH, WIDTH))
        return (self.layers[1](self.layers[0](x)) + x).square().sum()


def test_what_does_not_come_apart_is_one_block(clock: None) -> None:
    net = Around()
    names = joints(net, lambda trial: trial)
    assert names == ()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    (block,) = measure_blocks(net, names, net, [optimizer], torch.device("cpu"))
    assert block.name == "all"
    assert block.parameter_bytes == sum(p.nbytes for p in net.parameters())


class Twice(Tower):
    """Whose blocks run twice in a step, so that none of them has a place in the order."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + super().forward(tokens.flip(0))


def test_what_runs_twice_is_one_block(clock: None) -> None:
    net = Twice()
    assert joints(net, runs) == ()
    (block,) = measure_blocks(net, (), runs(net), [Slow(net.parameters(), lr=1.0)], torch.device("cpu"))
    assert (block.forward_seconds, block.backward_seconds) == (pytest.approx(12), pytest.approx(120))


@pytest.mark.thorough
def test_a_recipe_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    words = ["recipe=vit", "trainer.accelerator=cpu"]
    cli.main(["profile", *words, "--steps", "3", "--out", str(path)])
    found = read(path)
    assert (found.model.name, found.model.words) == (" ".join(words), tuple(words))
    assert [b.name.rpartition(".")[2] for b in found.model.blocks] == ["inputs", "0", "1", "2", "layernorm"]
    assert found.model.batch == 8
    tensors = parameters(words)
    assert found.model.parameter_bytes == sum(p.nbytes for p in tensors)
    assert found.model.state_bytes == 2 * found.model.parameter_bytes + 4 * len(tensors), "two moments and the step"
    assert len(found.variation) == 3
    blocks = sum(b.pass_seconds + b.update_seconds for b in found.model.blocks)
    assert found.model.loop_seconds >= 0
    assert found.model.seconds == pytest.approx(blocks + found.model.loop_seconds)
    assert sum(found.variation) == pytest.approx(3, abs=1e-3)
    assert list(found.hosts.values()) == [found.model.device]
    printed = capsys.readouterr().out
    assert shown(found.model).columns[0]._cells == ["inputs", "layers.0", "layers.1", "layers.2", "layernorm"]
    assert "│ inputs" in printed
    assert "sum of the blocks" in printed


def parameters(words: list[str]) -> list[nn.Parameter]:
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = composed(*words)
        return list(build_model(cfg, instantiate(cfg.data).sizes).parameters())


class Perceptron(LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(module: Perceptron, watch: StepProfile) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=6, callbacks=[watch], enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(torch.ones(256, 256), batch_size=32))  # type: ignore[arg-type]


class Products(TorchDispatchMode):
    """Moves the clock by a second for every product of matrices, wherever one is computed."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Clock.now += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_blocks_add_up_to_a_step_of_a_plain_loop(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out or counted twice."""
    monkeypatch.setattr(command, "laps", lambda device: Clock())
    module, watch = Perceptron(), StepProfile(lambda: None)
    with Products():
        fit(module, watch)
        start = Clock.now
        module.layers(torch.ones(32, 256)).square().mean().backward()
    step = Clock.now - start
    assert step == 4 + 4 + 3, "forward, weights, inputs but the first layer's"
    assert sum(block.forward_seconds for block in watch.blocks) == 4
    assert sum(block.backward_seconds for block in watch.blocks) == 7
    assert watch.steps() == [step] * 3


def test_mistakes_are_one_line() -> None:
    with pytest.raises(SystemExit, match="error: steps must be at least 2, got 1"):
        cli.main(["profile", "recipe=vit", "--steps", "1"])
    with pytest.raises(SystemExit, match=r"error: trainer.accumulate_grad_batches=4: .* leave the override out"):
        cli.main(["profile", "recipe=vit", "trainer.accumulate_grad_batches=4"])
    with pytest.raises(SystemExit, match=r"error: .* 'recipe/coffee': choose one of gpt, resnet, vit"):
        cli.main(["profile", "recipe=coffee"])
    chosen = r"error: 'recipe=gpt experiment=gossip_muon' sets up strategy=gossip, .* such as optimizer=muon$"
    with pytest.raises(SystemExit, match=chosen):
        cli.main(["profile", "recipe=gpt", "experiment=gossip_muon"])
    with pytest.raises(SystemExit, match=chosen):
        cli.main(["rehearse", "recipe=gpt", "experiment=gossip_muon", "workers=2", "--target", "2"])
    with pytest.raises(SystemExit, match=r"sets up strategy=gossip, .* leave out overrides of the strategy"):
        cli.main(["profile", "recipe=gpt", "strategy=gossip", "strategy/codec=int8"])
    with pytest.raises(SystemExit, match=r"error: .*callbacks\.model_checkpoint") as told:
        cli.main(["profile", "recipe=vit", "callbacks.model_checkpoint.save_top_k=2"])
    assert "strategy" not in str(told.value)
    with pytest.raises(ValueError, match="Perceptron optimizes manually"):
        fit(Perceptron(manual=True), StepProfile(lambda: None))


@pytest.mark.thorough
@pytest.mark.threads
def test_words_of_the_command_line_are_kept_but_for_the_strategy() -> None:
    """Of two words `strategy=` in the line that `plan` prints the first would mean nothing."""
    words = ["recipe=vit", "data.batch_size=2", "trainer.accelerator=cpu", "trainer.max_epochs=1"]
    found, _ = profile(cli.RECIPES, ["strategy=gossip", *words], steps=2)
    assert found.model.words == tuple(words)
    assert found.model.batch == 2
    assert {work.codec for work in found.model.rounds} >= {"Plain()", "Int8(block=256)"}
    assert all(work.seconds(found.model.parameter_bytes, 1) > 0 for work in found.model.rounds)
