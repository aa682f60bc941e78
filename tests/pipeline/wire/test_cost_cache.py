"""What stages cost, kept from one run to the next: found under the same conditions only, and by all stages or none."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_decentral.pipeline import (
    Bfloat16Activations,
    ExactActivations,
    Keep,
    OneForwardOneBackward,
    Planned,
    Recompute,
    TokenPipelineStrategy,
    ZeroBubble,
)
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.plan.cost import CostModel
from lightning_decentral.pipeline.plan.stage_cost import Link, StageCost
from lightning_decentral.pipeline.wire import slice_planner as planning
from lightning_decentral.pipeline.wire.cost_cache import CostCache, conditions
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.causal import built, edges
from tests.world import world

CALL = Call(torch.zeros(2, 24, dtype=torch.int64))
WHOLE = StagePlace(0, 4, True, True)
COSTS = CostModel(((8, 1e-3 / 3), (16, 2e-3 / 3)), (1e-5, 1e-7, 0.0, 1e-9 / 7), 0.01)
PROFILE = StageCost(COSTS, COSTS.times(2), 1e-4, Link(1e-4 / 3, 1e-7 / 3), 1.1)


def built_model(name="llama", dtype=torch.float32):
    return adapted(built(name, dtype))


def pipe(place=WHOLE, over=None, model=None, **changes):
    options = {"activations": Keep(), "boundary": ExactActivations(), "schedule": OneForwardOneBackward(), **changes}
    return StageRunner(
        model or built_model(), place, over, edges(over) if over else {}, device=torch.device("cpu"), **options
    )


def asked(own=None, call=CALL, hosts=("here",)):
    return conditions(own or pipe(), call, hosts)


def made(costs, pipe, over=None):
    plans = SlicePlanner(OneForwardOneBackward(), 1, costs)
    plans.stages = ["one"] * pipe.size
    plans.measure(CALL, pipe, over)
    plans.make(Planned(), CALL, pipe)
    return plans


def test_a_second_run_reads_what_the_first_measured(tmp_path):
    first, second = (made(CostCache(str(tmp_path)), pipe()) for _ in range(2))
    assert second.profiles == first.profiles
    assert second.slices == first.slices
    assert first.summary()["fit of the costs"].endswith("measured by this run")
    assert second.summary()["fit of the costs"].endswith("measured by an earlier run")
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert (found["format"], found["conditions"]["model"]) == (3, "LlamaForCausalLM")


def frozen():
    found = built_model()
    next(found.module.parameters()).requires_grad_(False)
    return found


DIFFERENT = {
    "another type": lambda: asked(pipe(model=built_model(dtype=torch.float64))),
    "another attention": lambda: asked(pipe(model=built_model("qwen2, sliding from block 2"))),
    "frozen": lambda: asked(pipe(model=frozen())),
    "another place": lambda: asked(pipe(replace(WHOLE, last=False))),
    "a longer sequence": lambda: asked(call=Call(torch.zeros(2, 32, dtype=torch.int64))),
    "a mask": lambda: asked(call=replace(CALL, attention_mask=torch.ones(2, 24))),
    "packed documents": lambda: asked(call=replace(CALL, documents=torch.zeros(2, 24, dtype=torch.int64))),
    "recomputation": lambda: asked(pipe(activations=Recompute())),
    "smaller messages": lambda: asked(pipe(boundary=Bfloat16Activations())),
    "another order": lambda: asked(pipe(schedule=ZeroBubble())),
    "stages on two hosts": lambda: asked(hosts=("here", "there")),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_other_work_is_measured_itself(tmp_path, change):
    kept = CostCache(str(tmp_path))
    kept.keep(asked(), PROFILE)
    assert kept.find(asked()) == PROFILE
    assert kept.find(change()) is None


def test_hosts_are_known_by_who_shares_one_not_by_name():
    assert asked(hosts=("a", "a", "b")) == asked(hosts=("c", "c", "d")) != asked(hosts=("a", "b", "b"))


@pytest.mark.parametrize(("owner", "name"), [
    ("torch", "__version__"), ("torch", "get_num_threads"), ("torch", "get_float32_matmul_precision"),
    ("lightning_decentral.pipeline.wire.cost_cache", "device_name"),
])  # fmt: skip
def test_another_machine_measures_itself(monkeypatch, owner, name):
    own = pipe()
    here = asked(own)
    monkeypatch.setattr(f"{owner}.{name}", "2.99" if name == "__version__" else lambda *_: "another")
    assert CostCache.path("costs", asked(own)) != CostCache.path("costs", here)


def test_half_precision_is_measured_itself():
    own = pipe()
    here = asked(own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CostCache.path("costs", asked(own)) != CostCache.path("costs", here)


def changed(file, *path, to):
    whole = found = json.loads(file.read_text())
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = to
    file.write_text(json.dumps(whole))


DAMAGES = {
    "empty": lambda file: file.write_text(""),
    "cut short": lambda file: file.write_text(file.read_text()[:-40]),
    "binary": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda file: file.write_text("[1, 2]"),
    "another format": lambda file: changed(file, "format", to=1),
    "of other work": lambda file: changed(file, "conditions", "threads", to=99),
    "not a number": lambda file: changed(file, "costs", "forward", "alone", to=[[8, float("nan")], [16, 1.0]]),
    "infinite": lambda file: changed(file, "costs", "forward", "alone", to=[[8, 1.0], [float("inf"), 1.0]]),
    "no time": lambda file: changed(file, "costs", "backward", "alone", to=[[8, 0.0], [16, 1.0]]),
    "one length": lambda file: changed(file, "costs", "backward", "alone", to=[[8, 1.0]]),
    "descending": lambda file: changed(file, "costs", "backward", "alone", to=[[16, 1.0], [8, 1.0]]),
    "three coefficients": lambda file: changed(file, "costs", "forward", "coefficients", to=[0.0, 0.0, 0.0]),
    "words": lambda file: changed(file, "costs", "loss_seconds", to="0.1"),
    "a message before it was sent": lambda file: changed(file, "costs", "link", "latency_seconds", to=-1.0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_counts_as_none_and_is_written_anew(tmp_path, damage):
    kept, own = CostCache(str(tmp_path)), asked()
    kept.keep(own, PROFILE)
    damage(kept.path(str(tmp_path), own))
    assert kept.find(own) is None
    kept.keep(own, PROFILE)
    assert kept.find(own) == PROFILE
    assert list(tmp_path.iterdir()) == [kept.path(str(tmp_path), own)]


def test_without_a_folder_every_run_measures_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "profile", lambda *_: PROFILE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        plans = made(CostCache(), pipe())
        assert plans.profiles == [PROFILE]
        assert plans.summary()["fit of the costs"].endswith("measured by this run")
    assert list(tmp_path.iterdir()) == []
    assert CostCache(TokenPipelineStrategy().cost_cache) == CostCache()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(UserWarning, match="can't be kept in .*file .*: give cost_cache a folder"):
        CostCache(str(file)).keep({}, PROFILE)
    assert CostCache(str(file)).find({}) is None


@pytest.mark.threads
@pytest.mark.parametrize(("known", "measuring"), [
    ((), [0, 1, 2, 3]), ((0, 1, 2, 3), []), ((0,), [0, 1, 2, 3]), ((0, 1), []), ((2, 3), [0, 1, 2, 3]),
])  # fmt: skip
def test_all_stages_measure_or_none(tmp_path, monkeypatch, known, measuring):
    """Two pipelines of two stages, each worker on a host of its own. The first pipeline's stages decide for all, and
    keep what they measured."""
    measured = []

    def worker(group):
        over, rank = GlooTransport(group), group.rank()
        own = pipe(StagePlace(2 * (rank % 2), 2 * (rank % 2) + 2, rank % 2 == 0, rank % 2 == 1))
        own.size = 2
        kept = CostCache(str(tmp_path / str(rank)))
        if rank in known:
            kept.keep(asked(own, hosts=("here", "here")), replace(PROFILE, loss_seconds=float(rank)))
        return made(kept, own, over).profiles

    def profile(pipe, call):
        measured.append(pipe.place.first_block // 2)
        return replace(PROFILE, loss_seconds=10.0 + pipe.place.first_block // 2)

    monkeypatch.setattr(planning, "profile", profile)
    wanted = [10.0, 11.0] if measuring else [0.0, 1.0]
    assert [[p.loss_seconds for p in profiles] for profiles in world(4, worker)] == [wanted] * 4
    assert sorted(measured) == sorted(rank % 2 for rank in measuring)
    assert sorted(int(f.name) for f in tmp_path.iterdir()) == sorted(
        {*known, *(rank for rank in measuring if rank < 2)}
    )


@pytest.mark.threads
def test_pipelines_with_sequences_of_different_lengths_measure_in_the_same_steps(monkeypatch):
    """By the first pipeline's: who decided by its own would wait for the others in the second step."""
    lengths = [(24, 40), (40, 24), (32, 48)]

    def worker(group):
        own, over, plans = pipe(), GlooTransport(group), SlicePlanner(OneForwardOneBackward(), 1)
        for both in lengths:
            plans.measure(Call(torch.zeros(2, both[over.rank], dtype=torch.int64)), own, over)
        return [profile.loss_seconds for profile in plans.profiles]

    monkeypatch.setattr(planning, "profile", lambda _, call: replace(PROFILE, loss_seconds=float(call.inputs.shape[1])))
    assert world(2, worker) == [[40.0], [40.0]]
