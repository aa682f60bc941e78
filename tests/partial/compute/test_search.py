"""Cuts found in networks that are no single chain: twins, layers of several classes, compiled parts, one layer."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_decentral.partial import Blocks, SavedBytes
from lightning_decentral.partial.compute.cut import Bypass, Cutter, gradients
from lightning_decentral.partial.compute.search import CutPlan, joints, search
from lightning_decentral.partial.compute.trial import trial_copy
from tests.partial.towers import LABELS, Network


class Vgg(nn.Module):
    """Convolutions hold the activations, linear layers nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 32, 32]
        pairs = itertools.pairwise(widths)
        layers = [[nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)] for a, b in pairs]
        self.features = nn.Sequential(*[layer for three in layers for layer in three])
        self.classifier = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(512, 512), nn.Linear(512, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Twins(nn.Module):
    """A teacher that nobody trains, registered and run first, and the student that learns from it."""

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        self.teacher = Network(tied=False, norm=False).requires_grad_(False)
        self.student = Network(tied=False, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.graph):
            target = self.teacher(x)
        return (self.student(x) - target).square()


def seeded(batch: Callable[[], Tensor]) -> Callable[[nn.Module], Callable[[], Tensor]]:
    def run_of(trial: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            torch.manual_seed(3)
            return trial(batch()).square().mean()

        return run

    return run_of


def symbols() -> Tensor:
    return torch.arange(12) % LABELS


def found(module: nn.Module, batch: Callable[[], Tensor], cuts: Any = "auto", balance: Any = None) -> CutPlan:
    return search(module, cuts, balance or SavedBytes(), seeded(batch))


def test_a_vgg_is_cut_in_its_features() -> None:
    """Where its activations lie; a chain of its linear layers alone would leave nine tenths of them in one segment."""
    plan = found(Vgg(), lambda: torch.randn(4, 3, 32, 32))
    assert plan.boundaries[0].startswith("features.")
    saved = [cost.saved_bytes for cost in plan.costs]
    assert max(saved) < 0.6 * sum(saved)
    within = found(Vgg(), lambda: torch.randn(4, 3, 32, 32), ["classifier.3", "classifier.4"])
    saved = [cost.saved_bytes for cost in within.costs]
    assert saved[0] > 0.9 * sum(saved)


@pytest.mark.parametrize("graph", [False, True])
def test_the_student_is_cut_and_not_its_teacher(graph: bool) -> None:
    module = Twins(graph)
    plan = found(module, symbols, balance=Blocks())
    assert plan.boundaries == tuple(f"student.blocks.{i}" for i in (1, 2, 3))
    run, cutter = seeded(symbols)(module), Cutter(module, plan.boundaries)
    full, cut = gradients(module, run, cutter.at(None)), gradients(module, run, cutter.at(1))
    for name, gradient in full.items():
        if name.startswith("student") and plan.segment_of[name] > 1:
            torch.testing.assert_close(cut[name], gradient)
        else:
            assert cut[name] is None, name


@pytest.mark.parametrize("cuts", ["auto", 1])
def test_one_layer_is_trained_in_full(cuts: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if cuts == 1:
        with pytest.raises(ValueError, match="no chain of blocks to cut in Sequential"):
            found(module, lambda: torch.ones(2, 4), cuts)
        return
    plan = found(module, lambda: torch.ones(2, 4), cuts)
    assert (plan.boundaries, plan.segments, set(plan.segment_of.values())) == ((), 1, {0})
    run, cutter = seeded(lambda: torch.ones(2, 4))(module), Cutter(module, plan.boundaries)
    assert all(g is not None for g in gradients(module, run, cutter.at(None, [])).values())


def test_blocks_cuts_before_every_block_and_behind_the_last() -> None:
    untied, tied = (found(Network(tied=tied, norm=False), symbols, "blocks") for tied in (False, True))
    names = tuple(f"blocks.{i}" for i in range(4))
    assert untied.boundaries == (*names, "head")
    assert tied.boundaries == (*names[1:], "head"), "before the first block is nothing but the head's weight"
    assert [untied.lowest_use(s) for s in range(6)] == list(range(6))
    assert [tied.lowest_use(s) for s in range(5)] == [0, 1, 2, 3, 0], "the head's weight is the embedding"


# ---- compiled --------------------------------------------------------------------------------------------------------


def compiled(kind: str) -> nn.Module:
    """With a compiler that only traces: what the machine code computes isn't the question."""
    torch.manual_seed(0)
    network = Network(tied=True, norm=False)
    if kind == "whole":
        return nn.Sequential(torch.compile(network, backend="aot_eager"))
    if kind == "in place":
        network.compile(backend="aot_eager")
    for i in range(4):
        if kind == "wrapped blocks":
            network.blocks[i] = torch.compile(network.blocks[i], backend="aot_eager")
        if kind == "blocks in place":
            network.blocks[i].compile(backend="aot_eager")
    return nn.Sequential(network)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["whole", "in place", "wrapped blocks", "blocks in place"])
def test_compiled_parts_are_cut_as_they_would_be_otherwise(kind: str) -> None:
    """Also where a validation compiled them before the cuts were there."""
    plain, module = compiled("nothing"), compiled(kind)
    runs = [seeded(symbols)(m) for m in (plain, module)]
    with torch.no_grad():
        runs[1]()
    plans = [search(m, 3, Blocks(), seeded(symbols)) for m in (plain, module)]
    cutters = [Cutter(m, plan.boundaries) for m, plan in zip((plain, module), plans, strict=True)]
    assert plans[0].boundaries == tuple(name.replace("_orig_mod.", "") for name in plans[1].boundaries)
    for cut, factors in ((None, [1.0, 2.0, 1.0]), (1, [1.0, 1.0, 3.0]), (0, [1.0] * 3)):
        ours, theirs = (
            gradients(m, run, cutter.at(cut, factors))
            for m, run, cutter in zip((module, plain), reversed(runs), reversed(cutters), strict=True)
        )
        assert any(g is None for g in theirs.values()) == (cut is not None)
        torch.testing.assert_close({n.replace("_orig_mod.", ""): g for n, g in ours.items()}, theirs)


# ---- bypassed --------------------------------------------------------------------------------------------------------


def test_gradients_flow_through_what_is_bypassed_and_it_keeps_less() -> None:
    module = Network(tied=False, norm=False)
    module.head.bias.requires_grad_(False)
    run, bypass = seeded(symbols)(module), Bypass()
    run().backward()
    full = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    bypass.begin([*module.blocks[2].parameters(), *module.head.parameters()])
    with bypass.lifted():
        assert module.head.weight.requires_grad
        assert not module.head.bias.requires_grad, "the user's freezing stays"
    run().backward()
    bypass.begin(())
    for name, parameter in module.named_parameters():
        if name.startswith(("blocks.2", "head")):
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, full[name])
    assert [n for n, p in module.named_parameters() if not p.requires_grad] == ["head.bias"]


def test_joints_are_those_of_the_student() -> None:
    assert joints(Twins(graph=False), seeded(symbols))[0] == "student.blocks.0"


def test_a_pruned_module_is_copied_with_its_masks() -> None:
    """Pruning leaves a product with a history in the module, which torch's deepcopy refuses."""
    layer = nn.Linear(4, 3)
    prune.random_unstructured(layer, "weight", amount=0.5)
    x = torch.randn(2, 4)
    copied = trial_copy(layer)
    assert torch.equal(copied(x), layer(x))
    copied(x).sum().backward()
    assert layer.weight_orig.grad is None


class Keeping(Network):
    """Keeps functions, which a copy of it shares."""

    def __init__(self) -> None:
        super().__init__(tied=False, norm=False)
        self.register_buffer("seen", torch.zeros(2))
        self.steps, self.taken = 0, list[int]()
        self.count: Callable[[], None] = lambda: None
        self.scaled: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.scaled(super().forward(x))


def test_what_the_module_keeps_is_as_it_was() -> None:
    module = Keeping()
    taken = module.taken

    def count() -> None:
        module.steps += 1
        module.taken.append(module.steps)
        module.seen += 1

    module.count = count
    found(module, symbols)
    assert module.steps == 0
    assert module.taken is taken
    assert taken == []
    assert module.seen.tolist() == [0, 0]


def test_a_function_that_computes_with_the_module_itself_is_refused() -> None:
    module = Keeping()
    module.scale = nn.Parameter(torch.ones(1))
    module.scaled = lambda x: x * module.scale
    with pytest.raises(ValueError, match=r"Keeping keeps a function .* own scale .*: make the function a"):
        found(module, symbols)
    assert module.scale.grad is None


def test_buffers_that_cannot_be_written_are_left_alone() -> None:
    module = Network(tied=False, norm=False)
    module.register_buffer("scale", torch.ones(1).expand(8))
    with torch.inference_mode():
        module.register_buffer("table", torch.arange(3.0))
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    assert found(module, symbols).segments > 1
    assert module.table.tolist() == [0, 1, 2]
