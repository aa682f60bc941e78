"""Each strategy with several workers introduces itself in a line, and what it says of bytes is what it sends."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.elastic.watched import WatchedProcess
from lightning_decentral.gossip import Elastic, Gossip, GossipReplicas, Int8, Plain, Ring, StartSummary
from lightning_decentral.optim import AccumAdamW, Muon, muon_groups
from lightning_decentral.pipeline import Uniform
from lightning_decentral.shared import introduction
from lightning_decentral.shared.introduction import ACCUM, MUON, adam_hint
from lightning_decentral.shared.plan.known_losses import known_losses, overrides_of
from tests.pipeline.training import Language
from tests.tiny import QUIET, Net, SizedBatches, in_processes

FORKED: dict[str, Any] = {"start_method": "fork"}


class Layers(Net):
    """As `Net`, with a chain of blocks."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.drop = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # type: ignore[assignment]


@rank_zero_only
def shown(line: str) -> None:
    sys.stderr.write(f"start| {line}\n")


def fitted(module: LightningModule, strategy: Any, size: int, callbacks: list[Callback]) -> Any:
    trainer = Trainer(**QUIET, max_steps=2, devices=size, strategy=strategy, callbacks=callbacks)
    trainer.fit(module, None if isinstance(module, Language) else SizedBatches(6))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(introduction, "rank_zero_info", shown)

    def of(module: LightningModule, strategy: Any, size: int, *callbacks: Callback) -> list[str]:
        in_processes(fitted, module, strategy, size, list(callbacks))
        return [row.partition("| ")[2] for row in capsys.readouterr().err.splitlines() if row.startswith("start| ")]

    return of


STARTS = {
    "gossip": (
        GossipStrategy(codec=Int8(), **FORKED),
        Net(),
        "gossip: 2 workers on Auto -> Hypercube, Int8 messages, ",
    ),
    "compressed": (
        CompressedStrategy(**FORKED),
        Net("adamw"),
        "compressed: 2 workers, gradients averaged as Int8 codes, ",
    ),
    "partial": (PartialBackpropStrategy(**FORKED), Layers(), "partial_backprop: 2 workers, each trains the top of "),
    "pipeline": (
        TokenPipelineStrategy(slicing=Uniform(1), **FORKED),
        Language(),
        "token_pipeline: 1 pipeline of 2 stages, 1 micro-batch ",
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_one_line_by_worker_0_says_what_trains_and_what_is_evaluated(name: str, lines: Any) -> None:
    strategy, module, start = STARTS[name]
    (line,) = lines(module, strategy, 2)
    assert line.startswith(start)
    assert line.endswith("evaluated")
    assert name == "pipeline" or " a worker and step (all-reduce: " in line


def test_pipelines_that_gossip_name_it_and_what_adam_does(lines: Any) -> None:
    line, hint = lines(
        Language(), TokenPipelineStrategy(stages=1, slicing=Uniform(1), replicas=GossipReplicas(), **FORKED), 2
    )
    assert line.startswith("token_pipeline: 2 pipelines of 1 stage, ")
    assert line.endswith("the mean of the pipelines is evaluated")
    assert hint.startswith("AdamW takes smaller steps here than under ddp.")


def test_the_hint_comes_without_the_table_and_not_twice_with_it(lines: Any) -> None:
    _, hint = lines(Net("adamw"), GossipStrategy(**FORKED), 2)
    assert "that sets rates), from lightning_decentral.optim: with attention or embeddings `Muon(muon_groups(" in hint
    assert lines(Net("adamw"), GossipStrategy(**FORKED), 2, StartSummary()) == [], "the table has all of it"
    (line,) = lines(Net("adamw"), CompressedStrategy(**FORKED), 2, StartSummary())
    assert line.startswith("compressed: "), "of which the table has nothing"
    assert lines(Net("adamw"), GossipStrategy(**FORKED), 1) == [], "one worker"


def looped(name: str) -> None:
    def loop(fabric: Fabric) -> None:
        model, optimizer = fabric.setup(module := Layers(), AdamW(module.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(model(torch.randn(4, 8)).square().mean())
            optimizer.step()

    Fabric(accelerator="cpu", devices=2, strategy=name).launch(loop)


@pytest.mark.parametrize("name", ["gossip", "compressed", "partial_backprop"])
def test_a_loop_with_fabric_has_the_line_of_a_trainer_once(
    name: str, lines: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_processes(looped, f"{name}_fork")
    printed = [row.partition("| ")[2] for row in capsys.readouterr().err.splitlines() if row.startswith("start| ")]
    assert printed[0].startswith(f"{name}: 2 workers")
    assert printed[0].endswith("evaluated")
    assert " a worker and step (all-reduce: " in printed[0]
    assert len(printed) == 1 + (name == "gossip"), "and gossip's hint"


@pytest.mark.parametrize(("size", "sent"), [(1, "with a second one 400 B"), (2, "400 B"), (3, "800 B")])
def test_elastic_workers_name_the_bytes_of_the_members_there_are(size: int, sent: str) -> None:
    run: Any = SimpleNamespace(elastic=Elastic(workers=(1, 4)), members=["w"] * size, topology=Ring(), codec=Plain())
    run.weights, run.combine, run.evaluate, run.optimizers = Gossip().weights, Gossip(), "mean", []
    run.lightning_module = Own()
    run.counted = lambda: [nn.Parameter(torch.zeros(100))]
    (line,) = WatchedProcess.introduction(run)
    assert f", uncompressed messages, {sent} a worker and step (all-reduce: " in line
    assert line.startswith(f"elastic gossip: {size} member{'s' * (size > 1)} of 1 to 4 on Ring()")


# ---- the hint --------------------------------------------------------------------------------------------------------


class Own(nn.Linear):
    """A module of which the pasted code makes an optimizer."""

    def __init__(self) -> None:
        super().__init__(3, 3)


def made(hint: str, self: nn.Module) -> list[Any]:
    """Optimizers of the hint's code."""
    names = {"Muon": Muon, "muon_groups": muon_groups, "AccumAdamW": AccumAdamW, "self": self}
    return [eval(code, names) for code in hint.split("`")[1::2]]


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_the_code_of_the_hint_makes_optimizers_with_the_settings_in_use(make: type[Adam]) -> None:
    self = Own()
    group = {"params": [*self.parameters()], "lr": torch.tensor(3e-4), "betas": (0.5, 0.99), "weight_decay": 0.1}
    muon, accum = made(adam_hint([make([group], lr=1.0)], 4), self)
    conf = OmegaConf.load("conf/experiment/gossip_muon.yaml").optimizer
    assert (muon.defaults["lr"], muon.defaults["momentum"]) == (conf.lr, conf.momentum), "as measured"
    assert (accum.defaults["lr"], accum.defaults["window"]) == (1.5e-4, 4), "half of the rate, as the docs have it"
    assert accum.defaults["betas"] == pytest.approx((0.5**4, 0.99**4), abs=1e-3)
    assert accum.defaults["weight_decay"] == 0.1


def test_a_warm_up_that_begins_is_not_taken_for_the_rate() -> None:
    self = Own()
    optimizer = AdamW(self.parameters(), lr=3e-4)
    LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    assert made(adam_hint([optimizer], 4), self)[1].defaults["lr"] == 1.5e-4


def test_groups_that_differ_in_decay_alone_as_for_a_gpt_get_the_code_of_muon() -> None:
    self = Own()
    optimizer = AdamW([{"params": [self.weight], "weight_decay": 0.1}, {"params": [self.bias], "weight_decay": 0.0}])
    (muon,) = made(adam_hint([optimizer], 4), self)
    assert isinstance(muon, Muon)


def transformer() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2))


def convolutional() -> nn.Module:
    """A block with attention to its channels (CBAM), whose class has the word in its name."""

    class ChannelAttention(nn.Sequential):
        pass

    return nn.Sequential(nn.Conv2d(3, 8, 3), ChannelAttention(nn.Linear(8, 2), nn.Linear(2, 8)), nn.Conv2d(8, 8, 3))


def test_a_module_whose_parameters_are_mostly_filters_gets_the_code_that_was_measured_on_such() -> None:
    module = convolutional()
    hint = adam_hint([AdamW(module.parameters(), lr=3e-4)], 4, module)
    (accum,) = made(hint, module)
    assert (accum.defaults["lr"], accum.defaults["window"]) == (3e-4, 4), "the same rate"
    resnet = next(one for one in known_losses() if one.recipe == "resnet")
    reached = f"({resnet.kind} on 4 workers: ddp's loss in {resnet.share(ACCUM):.2f} of its steps; small networks: "
    assert reached in hint
    assert "Muon" not in hint


def test_embeddings_get_the_code_that_was_measured_on_text() -> None:
    optimizers = [AdamW((module := transformer()).parameters())]
    assert adam_hint(optimizers, 4, module) == adam_hint(optimizers, 4)


@pytest.mark.parametrize("make", [Own, lambda: nn.TransformerEncoderLayer(4, 2), nn.ReLU,
                                  lambda: nn.Sequential(nn.Embedding(3, 3), convolutional())])  # fmt: skip
def test_where_the_parameters_dont_tell_the_hint_has_code_for_each_kind(make: Any) -> None:
    """A perceptron, attention by hand without embeddings, and embeddings among filters."""
    self, module = Own(), make()
    hint = adam_hint([AdamW(self.parameters(), lr=3e-4)], 4, module)
    muon, accum = made(hint, self)
    assert isinstance(muon, Muon)
    assert accum.defaults["lr"] == 3e-4
    assert hint.index("with attention or embeddings `Muon(") < hint.index("; without `AccumAdamW(")
    decayed = AdamW([{"params": [self.weight]}, {"params": [self.bias], "weight_decay": 0.0}])
    assert "; without AccumAdamW (" in adam_hint([decayed], 4, module)


def test_several_optimizers_or_groups_that_differ_get_names_alone() -> None:
    one, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    differ = AdamW([{"params": [one]}, {"params": [other], "lr": 0.1}])
    alike = AdamW([{"params": [one]}, {"params": [other]}])
    text = "Muon or AccumAdamW of lightning_decentral.optim, see docs/optimizers.md"
    for optimizers in ([differ], [alike, SGD([other], lr=0.1)]):
        hint = adam_hint(optimizers, 4)
        assert hint.endswith(text)
        assert "`" not in hint
    assert "AccumAdamW" not in adam_hint([differ], 8)
    assert "`Muon(" in adam_hint([alike], 4)


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_its_numbers_and_overrides_are_those_of_the_table(workers: int) -> None:
    hint = adam_hint([AdamW(Own().parameters())], workers)
    known = next(one for one in known_losses() if one.kind == "text" and f"text on {one.workers} workers" in hint)
    assert f"in recipes {overrides_of(MUON)} (ddp's loss in {known.share(MUON):.2f} of its steps; text on" in hint
    measured = f"in recipes {overrides_of(ACCUM)} (not ddp's loss in as many steps)" in hint
    assert measured == ("AccumAdamW" in hint) == (ACCUM in known.batches) == (workers < 8)


@pytest.mark.parametrize(("make", "workers"), [(SGD, 4), (Muon, 4), (AccumAdamW, 4), (AdamW, 1)])
def test_there_is_none_where_steps_are_as_long(make: type[Optimizer], workers: int) -> None:
    assert adam_hint([make([nn.Parameter(torch.zeros(2, 2))])], workers) == ""  # type: ignore[call-arg]
