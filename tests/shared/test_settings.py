"""Whatever two workers are given differently, both hear the same line before they train; what may differ does."""

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
)
from torch.utils.data import DataLoader, IterableDataset

import lightning_decentral
from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.gossip import (
    AllReduce,
    BFloat16,
    ConsensusMonitor,
    DifferenceCompression,
    Float16,
    FromGraph,
    FullyShard,
    Gossip,
    GossipReplicas,
    Int8,
    PushSum,
    RandomMatching,
    Ring,
    TopK,
)
from lightning_decentral.partial import Full, PerWorker, Staircase, Temporal
from lightning_decentral.pipeline import Recompute, Uniform
from lightning_decentral.shared import settings
from lightning_decentral.shared.plan.described import described
from lightning_decentral.shared.settings import of_callbacks, of_strategy, of_trainer, versions
from lightning_decentral.shared.wire.meeting.comparison import _difference
from tests.apart import lines, started_apart
from tests.gossip import codecs, rules, topologies
from tests.pipeline.training import Language
from tests.tiny import QUIET, Batches, Net, SizedBatches

STRATEGIES = (CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy)


def facts(strategy: Any, **options: Any) -> dict[str, str]:
    trainer = Trainer(**{**QUIET, "devices": 2, **options}, strategy=strategy)
    return {**versions(), **of_strategy(strategy), **of_trainer(trainer), **of_callbacks(trainer)}


def told(one: dict[str, str], other: dict[str, str]) -> str:
    """What worker 1, who has the other ones, says of them."""
    return _difference(1, json.dumps(one), other)


Plan = dict[str, Any]
# strategy, what worker 0 has, what worker 1 has, the setting that is named first
PLANS: list[tuple[Callable[..., Any], Plan, Plan, str]] = [
    (GossipStrategy, {}, {"delay": 0}, "delay=0"),
    (GossipStrategy, {}, {"codec": Float16()}, "codec=Float16"),
    (GossipStrategy, {"codec": Float16()}, {"codec": BFloat16()}, "codec=BFloat16"),
    (GossipStrategy, {"codec": Int8()}, {"codec": Int8(block=128)}, "codec.block=128"),
    (
        GossipStrategy,
        {"codec": DifferenceCompression(TopK())},
        {"codec": DifferenceCompression(TopK(fraction=0.5))},
        "codec.inner.fraction=0.5",
    ),
    (GossipStrategy, {}, {"topology": Ring()}, "topology=Ring"),
    (GossipStrategy, {"topology": RandomMatching()}, {"topology": RandomMatching(seed=1)}, "topology.seed=1"),
    (
        GossipStrategy,
        {"topology": FromGraph(edges=[[0, 1], [1, 2]])},
        {"topology": FromGraph(edges=[[0, 2], [1, 2]])},
        "topology.edges=",
    ),
    (GossipStrategy, {}, {"combine": PushSum()}, "combine=PushSum"),
    (GossipStrategy, {}, {"combine": Gossip(rate=0.5)}, "combine.rate=0.5"),
    (GossipStrategy, {}, {"evaluate": "own"}, "evaluate='own'"),
    (GossipStrategy, {}, {"timeout": timedelta(seconds=90)}, "timeout="),
    (GossipStrategy, {}, {"bucket_bytes": 1 << 20}, "bucket_bytes=1048576"),
    (GossipStrategy, {}, {"island": AllReduce(2)}, "island=AllReduce"),
    (GossipStrategy, {"island": AllReduce(2)}, {"island": FullyShard(2)}, "island=FullyShard"),
    (
        GossipStrategy,
        {"island": AllReduce(2)},
        {"island": AllReduce(2, bucket_bytes=1000)},
        "island.bucket_bytes=1000",
    ),
    (GossipStrategy, {}, {"timeout": timedelta(seconds=9)}, "timeout="),
    (CompressedStrategy, {}, {"codec": Int8(block=128)}, "codec.block=128"),
    (PartialBackpropStrategy, {}, {"depth": Full()}, "depth=Full"),
    (PartialBackpropStrategy, {}, {"depth": Temporal(warm_up=0.5)}, "depth.warm_up=0.5"),
    (
        PartialBackpropStrategy,
        {"depth": PerWorker(fractions=(1.0, 0.5))},
        {"depth": PerWorker(fractions=(0.5, 1.0))},
        "depth.fractions=",
    ),
    (PartialBackpropStrategy, {}, {"cuts": 2}, "cuts=2"),
    (PartialBackpropStrategy, {"cuts": ("a", "b")}, {"cuts": ("a", "c")}, "cuts="),
    (PartialBackpropStrategy, {"depth": Full()}, {"depth": Staircase()}, "depth=Staircase"),
    (TokenPipelineStrategy, {}, {"stages": 1}, "stages=1"),
    (TokenPipelineStrategy, {}, {"microbatches": 2}, "microbatches=2"),
    (TokenPipelineStrategy, {"slicing": Uniform(2)}, {"slicing": Uniform(4)}, "slicing."),
    (TokenPipelineStrategy, {}, {"activations": Recompute()}, "activations=Recompute"),
    (TokenPipelineStrategy, {}, {"replicas": GossipReplicas()}, "replicas=GossipReplicas"),
    (
        TokenPipelineStrategy,
        {"replicas": GossipReplicas()},
        {"replicas": GossipReplicas(delay=0)},
        "replicas.delay=0",
    ),
    (GossipStrategy, {"process_group_backend": "gloo"}, {}, "process_group_backend=None"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "zero", "one", "named"), PLANS, ids=[row[3] for row in PLANS])
def test_every_difference_of_a_plan_is_named(strategy: Any, zero: Plan, one: Plan, named: str) -> None:
    assert told(facts(strategy(**zero)), facts(strategy(**one))).startswith(f"worker 1 has {named}")


def checkpoint(**options: Any) -> Plan:
    return {"callbacks": [ModelCheckpoint(**options)], "enable_checkpointing": True}


TRAINERS: list[tuple[Plan, Plan, str]] = [
    ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    ({}, {"max_steps": 7}, "max_steps=7"),
    ({}, {"max_epochs": 7}, "max_epochs=7"),
    ({}, {"min_epochs": 7}, "min_epochs=7"),
    ({}, {"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
    (
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        "gradient_clip_algorithm=",
    ),
    ({}, {"precision": "bf16-mixed"}, "precision_plugin=MixedPrecision"),
    ({}, {"precision": "64-true"}, "precision_plugin=DoublePrecision"),
    ({}, {"limit_train_batches": 3}, "limit_train_batches=3"),
    ({}, {"limit_val_batches": 0}, "limit_val_batches=0"),
    ({}, {"overfit_batches": 1}, "limit_train_batches=1"),
    ({}, {"val_check_interval": 0.5}, "val_check_interval=0.5"),
    ({}, {"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2"),
    ({}, {"num_sanity_val_steps": 1}, "num_sanity_val_steps=1"),
    ({}, {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
    ({}, {"use_distributed_sampler": False}, "use_distributed_sampler=False"),
    ({}, {"fast_dev_run": 1}, "fast_dev_run=True"),
    ({}, {"devices": 3}, "devices=3"),
    ({}, {"num_nodes": 2}, "nodes=2"),
    ({}, {"max_time": "00:01:00:00"}, "Timer=given"),
    ({"max_time": "00:01:00:00"}, {"callbacks": [Timer(timedelta(hours=2))]}, "Timer.duration=7200.0"),
    ({}, checkpoint(), "ModelCheckpoint=given"),
    (checkpoint(every_n_epochs=1), checkpoint(every_n_epochs=2), "ModelCheckpoint.every_n_epochs=2"),
    (
        checkpoint(every_n_train_steps=5),
        checkpoint(every_n_train_steps=6),
        "ModelCheckpoint.every_n_train_steps=6",
    ),
    (checkpoint(monitor="a"), checkpoint(monitor="b"), "ModelCheckpoint.monitor='b'"),
    (checkpoint(), checkpoint(save_last=True), "ModelCheckpoint.save_last=True"),
    ({}, {"callbacks": [EarlyStopping("val_loss")]}, "EarlyStopping=given"),
    ({}, {"callbacks": [ConsensusMonitor()]}, "ConsensusMonitor=given"),
    (
        {"callbacks": [ConsensusMonitor()]},
        {"callbacks": [ConsensusMonitor(every_n_steps=7)]},
        "ConsensusMonitor.every_n_steps=7",
    ),
    ({}, {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging=given"),
    (
        {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 2})]},
        {"callbacks": [GradientAccumulationScheduler({0: 1, 3: 2})]},
        "GradientAccumulationScheduler.scheduling=",
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("zero", "one", "named"), TRAINERS, ids=[row[2] for row in TRAINERS])
def test_every_difference_of_a_trainer_is_named(zero: Plan, one: Plan, named: str) -> None:
    assert told(facts(GossipStrategy(), **zero), facts(GossipStrategy(), **one)).startswith(f"worker 1 has {named}")


class OfAUser(Callback):
    """Of one worker: writes a file, say."""


@pytest.mark.parametrize("other", [
    {"callbacks": [OfAUser()]},
    {"enable_progress_bar": True, "callbacks": [RichProgressBar()]},
    {"log_every_n_steps": 7},
    {"default_root_dir": "elsewhere"},
    {"deterministic": True},
    {"enable_model_summary": True},
    {"logger": True},
], ids=lambda other: ",".join(other))  # fmt: skip
def test_what_makes_nobody_wait_may_differ(other: Plan) -> None:
    assert told(facts(GossipStrategy()), facts(GossipStrategy(), **other)) == ""


def test_a_folder_may_differ() -> None:
    here, there = (facts(GossipStrategy(), **checkpoint(dirpath=folder)) for folder in ("here", "there"))
    assert told(here, there) == ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_option_of_a_strategy_takes_part(strategy: Any) -> None:
    """A new one that isn't kept under its name would be compared by nobody."""
    found, options = facts(strategy()), inspect.signature(strategy.__init__).parameters.values()
    assert {o.name for o in options if o.kind is o.KEYWORD_ONLY} - set(strategy.own) <= set(found)


@pytest.mark.parametrize("instances", [codecs.instances, rules.instances, topologies.instances])
def test_no_two_parts_that_differ_are_described_alike(instances: Callable[[], list[Any]]) -> None:
    for one, other in itertools.combinations(instances(), 2):
        assert (described(one, "part") == described(other, "part")) == (one == other), (one, other)


@pytest.mark.parametrize("name", ["lightning_decentral", "torch", "lightning"])
def test_versions_come_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ours = facts(GossipStrategy())
    owner = {"lightning_decentral": lightning_decentral, "torch": torch, "lightning": settings.lightning}[name]
    monkeypatch.setattr(owner, "__version__", "0.0.1")
    theirs = facts(GossipStrategy(delay=0))
    line = f"worker 1 has {name}=0.0.1, worker 0 has {name}={ours[name]}: give every worker the same"
    assert told(ours, theirs) == line


def test_how_torch_was_built_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = versions()
    monkeypatch.setattr(torch, "__version__", torch.__version__.split("+")[0] + "+cu999")
    assert versions() == ours


# ---- with a world ---------------------------------------------------------------------------------------------------


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.first.parameters(), lr=0.1)]


class Half(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


def fit(rank: int, given: tuple[Plan, Plan], twice: bool = False) -> str:
    """One worker of two, each with its own settings."""
    mine = {"strategy": {}, "module": Net, "entry": "fit", "ckpt_path": None, **given[rank]}
    options = {**QUIET, "max_steps": 2, **mine.get("trainer", {})}
    trainer = Trainer(**options, devices=2, strategy=mine.get("class", GossipStrategy)(**mine["strategy"]))
    module = mine["module"]()
    batches = {"val_dataloaders" if mine["entry"] == "fit" else "dataloaders": SizedBatches(2)}
    if mine["entry"] == "fit":
        batches["train_dataloaders"] = Batches(8)
    getattr(trainer, mine["entry"])(module, **batches, ckpt_path=mine["ckpt_path"])
    if twice:
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, Batches(8))
        trainer.validate(module, SizedBatches(2), verbose=False)
    return f"trained {trainer.global_step} steps"


WORLDS: dict[str, tuple[Plan, Plan, str]] = {
    "plan": ({"strategy": {"codec": Float16()}}, {"strategy": {"codec": BFloat16()}}, "codec=BFloat16"),
    "loop": ({}, {"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches=2"),
    "steps": ({}, {"trainer": {"max_steps": 3}}, "max_steps=3"),
    "delay": ({}, {"strategy": {"delay": 0}}, "delay=0"),
    "class": ({}, {"class": PartialBackpropStrategy}, "strategy=PartialBackpropStrategy"),
    "precision": ({}, {"trainer": {"precision": "bf16-mixed"}}, "precision_plugin=MixedPrecision"),
    "entry": ({}, {"entry": "validate"}, "entry=validate"),
    "evaluation": (
        {"entry": "test"},
        {"entry": "test", "trainer": {"limit_test_batches": 1}},
        "limit_test_batches=1",
    ),
    "optimizers": ({}, {"module": TwoOptimizers}, "optimizers=[SGD, SGD]"),
    "parameters": ({}, {"module": Half}, "parameters of the optimizers=[2]"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", WORLDS)
def test_workers_that_differ_all_say_so_within_seconds(tmp_path: Path, name: str) -> None:
    zero, one, named = WORLDS[name]
    found = started_apart(fit, 2, tmp_path, (zero, one))
    first, second = lines(found)
    assert first == second
    assert first.startswith(f"ValueError: worker 1 has {named}, worker 0 has "), found
    assert max(float(text.rpartition("\n")[2]) for text in found) < 30, found


def test_a_frozen_layer_of_one_worker_is_named(tmp_path: Path) -> None:
    found = lines(started_apart(fit, 2, tmp_path, ({}, {"module": Frozen})))
    weight = "head.weight (3, 8) torch.float32"
    line = f"ValueError: worker 1 has {weight} (frozen) where worker 0 has {weight}:"
    assert [text[: len(line)] for text in found] == [line] * 2


class Asks(Callback):
    """What all stages measured, after every step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert len(trainer.strategy.measured()) == 4


GATHERED: dict[str, tuple[Callable[[], Any], type[LightningModule], Plan, list[Callback]]] = {
    "compressed": (CompressedStrategy, Net, {"dropout": 0.0}, []),
    "gossip": (GossipStrategy, Net, {"dropout": 0.0}, []),
    "partial": (partial(PartialBackpropStrategy, cuts=["second"]), Net, {"dropout": 0.0}, []),
    "stages": (partial(TokenPipelineStrategy, slicing=Uniform(1)), Language, {}, [Asks()]),
}


def without_pickle(rank: int, name: str, folder: Path) -> str:
    """Fit, validation, a checkpoint, going on from it, where whatever would be unpickled is an error."""

    def unpickled(*_: Any) -> Any:
        raise AssertionError("something that arrived is unpickled")

    torch.distributed.distributed_c10d._tensor_to_object = unpickled
    strategy, module, options, callbacks = GATHERED[name]
    for steps, path in ((2, None), (4, folder / "a.ckpt")):
        saves = ModelCheckpoint(folder, "a", every_n_train_steps=2, save_top_k=-1, enable_version_counter=False)
        own = {"enable_checkpointing": True, "callbacks": [saves, *callbacks], "max_time": "00:01:00:00"}
        trainer = Trainer(**{**QUIET, **own}, devices=2, max_steps=steps, strategy=strategy())
        data = () if name == "stages" else (Batches(8), SizedBatches(2))
        trainer.fit(module(**options), *data, ckpt_path=path)
    return f"trained {trainer.global_step} steps"


@pytest.mark.sampled
@pytest.mark.parametrize("name", GATHERED)
def test_nothing_that_arrives_is_unpickled(tmp_path: Path, name: str) -> None:
    assert lines(started_apart(without_pickle, 2, tmp_path, name, tmp_path)) == ["trained 4 steps"] * 2


def resume(rank: int, folder: Path) -> str:
    """Both write a checkpoint; then one resumes and the other begins."""
    trainer = Trainer(**QUIET, max_steps=2, devices=2, strategy=GossipStrategy())
    module: LightningModule = Net()
    trainer.fit(module, Batches(8))
    trainer.save_checkpoint(folder / "a.ckpt")
    Trainer(**QUIET, max_steps=4, devices=2, strategy=GossipStrategy()).fit(
        Net(), Batches(8), ckpt_path=folder / "a.ckpt"
    )
    other = Trainer(**QUIET, max_steps=4, devices=2, strategy=GossipStrategy())
    other.fit(Net(), Batches(8), ckpt_path=folder / "a.ckpt" if rank == 0 else None)
    return "trained"


def test_a_checkpoint_for_one_worker_only_is_named(tmp_path: Path) -> None:
    line = "ValueError: worker 1 has ckpt_path=None, worker 0 has ckpt_path=given: give every worker the same"
    assert lines(started_apart(resume, 2, tmp_path, tmp_path)) == [line] * 2


def test_workers_that_agree_train_and_train_again(tmp_path: Path) -> None:
    may_differ: Plan = {"trainer": {"log_every_n_steps": 3}}
    assert lines(started_apart(fit, 2, tmp_path, ({}, may_differ), True)) == ["trained 4 steps"] * 2


@pytest.mark.threads  # its group is in this process
def test_a_single_worker_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> dict[str, str]:
        raise AssertionError("nobody to compare with")

    for name in ("versions", "of_strategy", "of_trainer", "of_callbacks", "check_same_settings"):
        monkeypatch.setattr(settings, name, asked)
    trainer = Trainer(**QUIET, max_steps=1, devices=1, strategy=GossipStrategy())
    trainer.fit(Net(), Batches(2))
    assert trainer.global_step == 1


class Endless(IterableDataset[tuple[torch.Tensor, int]]):
    """Has no length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return itertools.repeat((torch.randn(8), 0))


@pytest.mark.threads  # its group is in this process
def test_validation_data_may_have_no_length() -> None:
    options = {**QUIET, "max_steps": 1, "limit_val_batches": 2, "val_check_interval": 1, "devices": 1}
    trainer = Trainer(**options, strategy=GossipStrategy())
    trainer.fit(Net(), Batches(2), DataLoader(Endless(), batch_size=2))
    assert trainer.num_val_batches == [2]
    assert trainer.global_step == 1
