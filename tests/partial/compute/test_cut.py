"""Cuts of real architectures, the verdicts, and what the cut saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_decentral.partial import Blocks, Parameters, SavedBytes
from lightning_decentral.partial.compute.cut import Cutter, Verdict, gradients, judge, scale_gradient
from lightning_decentral.partial.compute.search import CutPlan, search
from lightning_decentral.partial.plan.cost import memory_fraction
from lightning_decentral.shared.compute.modules import candidates


class Around(nn.Module):
    """The network as a member, as LightningModules have it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def images(side: int) -> Callable[[nn.Module], Tensor]:
    return lambda network: network(pixel_values=torch.randn(4, 3, side, side)).logits.square().mean()


def tokens(network: nn.Module) -> Tensor:
    ids = torch.randint(0, 50, (2, 12))
    return nn.functional.cross_entropy(network(input_ids=ids).logits.flatten(0, 1), ids.flatten())


SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
T: Any = transformers
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], str, int, list[str]]] = {
    "vit": (
        lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, patch_size=4, image_size=16)),
        images(16), "ViTLayer", 4, [],
    ),
    "gpt2": (
        lambda: T.GPT2LMHeadModel(T.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=50, **NO_IDS)),
        tokens, "GPT2Block", 4, ["network.transformer.wte.weight"],
    ),
    "llama": (
        lambda: T.LlamaForCausalLM(T.LlamaConfig(**SMALL, vocab_size=50, **NO_IDS)),
        tokens, "LlamaDecoderLayer", 4, [],
    ),
    "bert": (
        lambda: T.BertForMaskedLM(T.BertConfig(**SMALL, vocab_size=50)),
        tokens, "BertLayer", 4, ["network.bert.embeddings.word_embeddings.weight"],
    ),
    "resnet": (
        lambda: T.ResNetForImageClassification(
            T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32], depths=[2, 2, 2], layer_type="basic")
        ),
        images(32), "ResNetBasicLayer", 6, [],
    ),
    "swin": (
        lambda: T.SwinForImageClassification(
            T.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4)
        ),
        images(32), "SwinLayer", 4, [],
    ),
    "convnext": (
        lambda: T.ConvNextForImageClassification(T.ConvNextConfig(hidden_sizes=[8, 16, 32, 32], depths=[2, 2, 3, 2])),
        images(64), "ConvNextLayer", 9, [],
    ),
}  # fmt: skip


def built(name: str) -> tuple[Around, Callable[[nn.Module], Callable[[], Tensor]]]:
    make, loss, *_ = NETWORKS[name]
    torch.manual_seed(0)
    module = Around(make()).train()

    def run_of(trial: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            torch.manual_seed(5)  # dropout, too
            return loss(trial.network)

        return run

    return module, run_of


@pytest.mark.sampled
@pytest.mark.parametrize("name", NETWORKS)
def test_every_cut_of_the_chain_is_accepted(name: str) -> None:
    module, run_of = built(name)
    _, _, kind, length, tied = NETWORKS[name]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    plan = search(module, length - 1, Blocks(), run_of)
    assert plan.chain is not None
    assert (plan.chain.kind, len(plan.chain.names), plan.segments) == (kind, length, length)
    assert set(plan.segment_of.values()) == set(range(length))
    for judged in plan.judged:
        assert [n for n, v in judged.verdicts.items() if v is Verdict.TIED] == tied
        assert Verdict.LEAK not in judged.verdicts.values()
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), "the search changed the module"
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_above_a_cut_are_the_full_ones(name: str) -> None:
    """Below there are none; of a tied weight the part above remains."""
    module, run_of = built(name)
    plan = search(module, "auto", SavedBytes(), run_of)
    assert plan.segments == 4
    run = run_of(module)
    cutter = Cutter(module, plan.boundaries)
    full = gradients(module, run, cutter.at(None))
    tied = NETWORKS[name][4]
    for cut in range(3):
        found = gradients(module, run, cutter.at(cut))
        for parameter, gradient in full.items():
            if plan.segment_of[parameter] <= cut:
                assert found[parameter] is None
            elif parameter not in tied and gradient is not None:
                torch.testing.assert_close(found[parameter], gradient)
    cutter.remove()


@pytest.mark.sampled
@pytest.mark.parametrize("name", NETWORKS)
def test_saved_bytes_fall_as_predicted(name: str) -> None:
    """Measured by saved tensors of a cut step against the plan's own numbers."""
    module, run_of = built(name)
    plan = search(module, "auto", SavedBytes(), run_of)
    run, cutter = run_of(module), Cutter(module, plan.boundaries)
    full = saved_bytes(module, run)
    for depth in (1, 2, 3):
        with cutter.at(3 - depth):
            assert saved_bytes(module, run) / full == pytest.approx(memory_fraction(plan.costs, depth), abs=0.02)


def saved_bytes(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Distinct storages that the graph keeps, parameters left out."""
    found: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    assert loss.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Run again in backward, blocks give the same gradients; reentrantly they would lose them, and are refused."""
    module, run_of = built("vit")
    cutter = Cutter(module, ["network.vit.layers.1"])
    plain = gradients(module, run_of(module), cutter.at(None, [3.0]))
    module.network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        with pytest.raises(ValueError, match="no chain of blocks"):
            search(module, 2, SavedBytes(), run_of)
        return
    assert search(module, 2, SavedBytes(), run_of).segments == 3
    checkpointed = gradients(module, run_of(module), cutter.at(None, [3.0]))
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient)


class Uncopied(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle a socket")


def test_a_module_that_cant_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Around can't be copied.*\(cannot pickle a socket\): don.t store what"):
        plan_of(Uncopied(), "auto")


def test_cuts_inside_a_residual_block_are_leaks() -> None:
    module, run_of = built("resnet")
    inside = "network.resnet.encoder.stages.1.layers.0.layer.1"
    (judged,) = judge(module, [inside], run_of(module))
    assert Verdict.LEAK in judged.verdicts.values()
    with pytest.raises(ValueError, match=f"no cut at {inside}.*goes around the boundary"):
        judged.refuse()


def test_resnets_hold_their_parameters_at_the_top() -> None:
    """Balanced by bytes saved and by parameters the cuts differ: that is why there is little traffic to save."""
    module, run_of = built("resnet")
    by_memory = search(module, 2, SavedBytes(), run_of)
    by_parameters = search(module, 2, Parameters(), run_of)
    assert by_memory.boundaries < by_parameters.boundaries
    sizes = [cost.parameter_bytes for cost in by_memory.costs]
    assert sizes[-1] / sum(sizes) > 0.7


class Experts(nn.Module):
    """Four branches side by side, which look like a chain, and a chain of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(sum(expert(x) for expert in self.experts)).square().mean()


def plan_of(module: nn.Module, cuts: Any) -> CutPlan:
    return search(Around(module), cuts, Blocks(), lambda trial: lambda: trial.network(torch.ones(2, 8)))


def test_branches_are_no_chain_and_the_next_candidate_is_tried() -> None:
    chains = candidates(Around(Experts()))
    assert [len(chain.names) for chain in chains[:1]] == [7], "all linear members, experts too"
    plan = plan_of(Experts(), "auto")
    assert plan.boundaries == ("network.blocks.1", "network.blocks.2")


class Forgotten(nn.Module):
    """A plain chain with an unused layer and a zero-initialised head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (self.head(x) - 1).square().mean()


def test_a_head_of_zeros_hides_nothing_and_the_unused_belongs_to_the_top() -> None:
    plan = plan_of(Forgotten(), 2)
    assert plan.segment_of["network.unused.weight"] == 2
    assert plan.judged[0].verdicts["network.unused.weight"] is Verdict.UNUSED
    assert [plan.segment_of[f"network.blocks.{i}.weight"] for i in range(3)] == [0, 1, 2]


class Begins(nn.Module):
    """Blocks that begin in place, or not; what goes into the third may go around it."""

    def __init__(self, inplace: bool, around: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(inplace), nn.Linear(8, 8)) for _ in range(4)])
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x) + x if self.around and index == 2 else block(x)
        return x.square().mean()


def test_blocks_may_begin_in_place() -> None:
    plan = plan_of(Begins(True), "auto")
    assert plan.boundaries == tuple(f"network.blocks.{i}" for i in (1, 2, 3))
    for cut, factors in ((None, [3.0, 0.5, 2.0]), (1, [1.0, 1.0, 0.5])):
        found = []
        for inplace in (True, False):
            module = Around(Begins(inplace))
            cutter = Cutter(module, plan.boundaries)
            found.append(gradients(module, lambda m=module: m.network(torch.ones(2, 8)), cutter.at(cut, factors)))
        assert all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(found[0].values(), found[1].values(), strict=True)
        )
        assert [gradient is None for gradient in found[0].values()] == 4 * [cut is not None] + 4 * [False]


def test_what_a_block_changes_in_place_and_goes_around_it_is_a_leak() -> None:
    with pytest.raises(ValueError, match=r"no cut at network.blocks.2: gradient of network.blocks.0.1.weight"):
        plan_of(Begins(True, around=True), ["network.blocks.2"])


def test_what_must_not_be_changed_in_place_stays_an_error() -> None:
    kept = torch.ones(2, requires_grad=True).tanh()  # its backward needs it
    scale_gradient(kept, 2.0).relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


class Needs(nn.Linear):
    """Asks for a gradient of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x)
        return super().forward(slope)


def test_a_step_that_fails_with_a_cut_names_the_cut() -> None:
    module = Experts()
    module.blocks = nn.Sequential(nn.Linear(8, 8), Needs(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"no cut at network.blocks.1: the step fails with it .*: cut elsewhere"):
        plan_of(module, ["network.blocks.1"])


# ---- grad modes ------------------------------------------------------------------------------------------------------


def test_grad_modes_are_put_back() -> None:
    module = Around(Forgotten())
    cutter = Cutter(module, ["network.blocks.1"])
    with cutter.at(0):
        loss = module.network(torch.ones(2, 8))
        assert torch.is_grad_enabled(), "after the network's forward"
        with torch.no_grad():
            assert not module.network(torch.ones(2, 8)).requires_grad, "the user's no_grad stays"
        again = module.network(torch.ones(2, 8))
    for output in (loss, again):
        module.zero_grad()
        output.backward()
        assert module.network.blocks[0].weight.grad is None
        assert module.network.blocks[1].weight.grad is not None
    assert module.network(torch.ones(2, 8)).requires_grad
    with pytest.raises(RuntimeError), cutter.at(0):
        module.network(torch.ones(2, 7))
    assert torch.is_grad_enabled()
    cutter.remove()
    module.zero_grad()
    module.network(torch.ones(2, 8)).backward()
    assert module.network.blocks[0].weight.grad is not None
