"""An elastic worker that was given other things than the run hears the first difference before it takes part."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.elastic.checks import JoinCheck, settings_of
from lightning_decentral.gossip import (
    AllReduce,
    Asynchronous,
    BFloat16,
    Complete,
    Elastic,
    Every,
    Gossip,
    GossipReplicas,
    GossipStrategy,
    Int8,
    MetropolisHastings,
    OuterNesterov,
    QuasiGlobalMomentum,
    Ring,
)
from lightning_decentral.shared.compute.layout import described
from lightning_decentral.shared.wire.plain import pack, unpack
from tests.tiny import QUIET

Plan = dict[str, Any]
LOBBY = "127.0.0.1:29400"
LAST = torch.channels_last


def gossip(elastic: Plan, **options: Any) -> Any:
    return GossipStrategy(elastic=Elastic(**{"lobby": LOBBY, **elastic}), **options)


def pipeline(elastic: Plan, stages: int = 1, **options: Any) -> Any:
    replicas = GossipReplicas(elastic=Elastic(**{"lobby": LOBBY, **elastic}), **options)
    return TokenPipelineStrategy(stages=stages, replicas=replicas)


def given(
    make: Callable[..., Any] = gossip,
    elastic: Plan | None = None,
    trainer: Plan | None = None,
    model: Callable[[nn.Module], Any] = lambda net: net,
    **options: Any,
) -> JoinCheck:
    """To a worker whose trainer, strategy and model are these."""
    net, strategy = nn.Conv2d(3, 4, 2), make(elastic or {}, **options)
    with_it = Trainer(**{**QUIET, "devices": 1, **(trainer or {})}, strategy=strategy)
    model(net)
    strategy.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1)]
    return JoinCheck(settings_of(strategy, with_it), described(net))


def refusal(run: JoinCheck, worker: JoinCheck) -> str:
    """Over the wire."""
    return worker.refuses(unpack(pack(run.now([{"present": {}, "trained": {}}]))))


OTHERS: list[tuple[Plan, str]] = [
    ({"combine": Gossip(rate=0.1)}, "combine.rate=0.1, the run has combine.rate=1.0"),
    ({"combine": QuasiGlobalMomentum()}, "combine=QuasiGlobalMomentum, the run has combine=Gossip"),
    ({"combine": OuterNesterov(), "topology": Every(2, Complete())}, "topology=Every, the run has topology=Auto"),
    ({"topology": Ring(), "weights": MetropolisHastings()}, "topology=Ring, the run has topology=Auto"),
    ({"codec": Int8()}, "codec=Int8, the run has codec=Plain"),
    ({"codec": BFloat16()}, "codec=BFloat16, the run has codec=Plain"),
    ({"delay": 0}, "delay=0, the run has delay=1"),
    ({"bucket_bytes": 64}, "bucket_bytes=64, the run has bucket_bytes=None"),
    ({"heals": 0}, "heals=0, the run has heals=3"),
    ({"evaluate": "own"}, "evaluate='own', the run has evaluate='mean'"),
    ({"timeout": timedelta(seconds=9)}, "timeout=datetime.timedelta(seconds=9), the run has timeout="),
    ({"elastic": {"workers": (2, 4)}}, "elastic.workers=(2, 4), the run has elastic.workers=(2, 16)"),
    (
        {"elastic": {"asynchronous": Asynchronous()}},
        "elastic.asynchronous=Asynchronous, the run has elastic.asynchronous=None",
    ),
    ({"trainer": {"precision": "bf16-true"}}, "precision_plugin=HalfPrecision, the run has precision_plugin=Precision"),
    ({"trainer": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches=2, the run has accumulate_grad_batches=1"),
    ({"trainer": {"gradient_clip_val": 0.5}}, "gradient_clip_val=0.5, the run has gradient_clip_val=None"),
    ({"trainer": {"max_steps": 7}}, "max_steps=7, the run has max_steps=-1"),
    ({"trainer": {"callbacks": [EarlyStopping("loss")]}}, "EarlyStopping=given, the run has no EarlyStopping"),
    ({"model": lambda net: net.weight.requires_grad_(False)}, "weight (4, 3, 2, 2) torch.float32 (frozen) where the"),
    ({"model": lambda net: net.to(memory_format=LAST)}, "weight (4, 3, 2, 2) torch.float32 strides (12, 1, 6, 3) wh"),
    (
        {"model": lambda net: net.register_buffer("more", torch.zeros(2))},
        "more (2,) torch.float32 where the run has no",
    ),
]


@pytest.mark.parametrize(("other", "named"), OTHERS, ids=[row[1].partition(",")[0] for row in OTHERS])
def test_the_first_difference_is_named(other: Plan, named: str) -> None:
    run, worker = given(), given(**other)
    assert refusal(run, worker).startswith(f"this worker has {named}")
    assert refusal(worker, run)
    assert refusal(worker, given(**other)) == ""


@pytest.mark.parametrize(
    "own",
    [
        {"elastic": {"weight": 3}},
        {"elastic": {"lobby": "127.0.0.1:1", "host": "127.0.0.1", "dead_after": 2.0}},
        {"island": AllReduce(2), "trainer": {"devices": 2}},
        {"trainer": {"precision": "bf16-mixed", "logger": False, "default_root_dir": "elsewhere"}},
    ],
    ids=lambda own: ",".join(own),
)
def test_what_may_differ_does(own: Plan) -> None:
    trainer = {"precision": own.get("trainer", {}).get("precision", "32-true")}
    assert refusal(given(trainer=trainer), given(**own)) == ""


def test_pipelines_compare_their_replicas() -> None:
    run = given(pipeline)
    assert refusal(run, given(pipeline, {"host": "127.0.0.1", "weight": 2})) == ""
    assert "replicas.delay=0, the run has replicas.delay=1" in refusal(run, given(pipeline, delay=0))
    assert "stages=2, the run has stages=1" in refusal(run, given(pipeline, stages=2))
    assert "strategy=ElasticTokenPipelineStrategy" in refusal(given(), run)


def test_a_run_of_an_older_version_is_refused() -> None:
    assert given().refuses({}).startswith("this worker has lightning_decentral=")
