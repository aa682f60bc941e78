"""Every computed row of "Against the papers" gives its committed result again."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_decentral.gossip.plan.topology.topology import step_graph
from lightning_decentral.pipeline.plan.schedule import Action, Kind, TeraPipe, tasks
from lightning_decentral.shared.plan.timeline import makespan, run
from pages import papers as page
from papers import (
    accumadam,
    dtfm,
    gossip,
    karma,
    onepeer,
    pushsum,
    rannc,
    ravnest,
    seq1f1b,
    serverless,
    swarm,
    terapipe,
)
from papers.rows import computed
from tests.docs.numbers import RESULTS

COMPUTED = computed()
FIELDS = {
    "paper", "title", "headline", "theirs", "ours", "ratios", "command", "kind", "assumptions", "cannot_compare",
    "contradicts",
}  # fmt: skip


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"paper-{name}.json").read_text())
    return found


def numbers(found: dict[str, Any], which: str = "ours") -> dict[str, float]:
    return {one["label"]: one["value"] for one in found[which]}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_row_gives_its_committed_result_again(name: str) -> None:
    again, there = COMPUTED[name].row().record(), committed(name)
    for which in ("theirs", "ours", "ratios", "further"):
        assert numbers(again, which) == pytest.approx(numbers(there, which), rel=2e-3)
    plain = FIELDS - {"theirs", "ours", "ratios"}
    assert {key: again[key] for key in plain} == {key: there[key] for key in plain}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("paper-*.json")), ids=lambda path: path.stem)
def test_a_result_has_every_field_and_its_labels_agree(path: Any) -> None:
    found = json.loads(path.read_text())
    assert set(found) >= FIELDS
    assert found["kind"] in ("formula", "simulated devices", "virtual clock", "measured")
    labels = [[one["label"] for one in found[which]] for which in ("theirs", "ours", "ratios")]
    assert labels[0] == labels[1] == labels[2]
    assert len(set(labels[0])) == len(labels[0])
    assert found["assumptions"]
    sentences = (*found["assumptions"], found["cannot_compare"], found["contradicts"])
    assert all(text.endswith(".") for text in sentences if text)


def test_the_page_is_made_between_its_markers() -> None:
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    made = page.written(text)
    assert page.made() in made
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert page.written(made) == made


def test_terapipe_the_closed_form_is_the_timeline() -> None:
    for setting in terapipe.SETTINGS[1:3]:
        for slices in (setting.planned(), (1024, 1024)):
            timeline = setting.situation(setting.batch).step_seconds(slices)
            assert timeline == pytest.approx(setting.iteration(slices), rel=1e-9)


def test_terapipe_plans_come_within_ten_percent() -> None:
    """The four planned settings of the table, with one calibrated number each, which is none of these."""
    ratios = numbers(committed("terapipe"), "ratios")
    assert all(0.9 < ratios[f"{s.name}: planned, s"] < 1.1 for s in terapipe.SETTINGS)
    for setting in terapipe.SETTINGS:
        assert setting.iteration((terapipe.LENGTH,)) == pytest.approx(setting.without_seconds)


def test_seq1f1b_memory_is_exact() -> None:
    ratios = numbers(committed("seq1f1b"), "ratios")
    exact = [ratio for label, ratio in ratios.items() if label.startswith("memory")]
    assert exact == [1.0] * 3
    assert seq1f1b.mismatches() == 0


def test_dtfm_places_every_gpu_once_and_a_city_keeps_its_own() -> None:
    for stages, order in dtfm.placed(dtfm.HEADLINE).items():
        assert sorted(order) == list(range(64))
        of_city = {order[p * 8 + s] // 8 for p in range(8 // stages) for s in range(stages)}
        assert len(of_city) == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_dtfm_the_closed_form_is_the_timeline(blocking: bool) -> None:
    """Of links that carry one message at a time in each direction."""
    through, setting = (0, 0, 1, 2, 5, 5, 7, 3), replace(dtfm.SETTINGS[0], batch=128)
    links = dtfm.cities()
    delays = [float(links.latency_seconds[pair]) for pair in pairwise(through)]

    def message(action: Action) -> float:
        hop = action.stage - (action.kind is Kind.BACKWARD)
        carried = float(dtfm.ACTIVATION_BYTES / links.bytes_per_second[through[hop], through[hop + 1]])
        return carried + (delays[hop] if blocking else 0.0)

    def compute(action: Action) -> float:
        return setting.forward * (1 if action.kind is Kind.FORWARD else 3)

    occupied = []
    for task in tasks(TeraPipe().actions(8, setting.microbatches, 1), 1, compute, message):
        kind, _, source = task.name.split()[:3]  # a message: "F stage 0 micro-batch 0 slice 0 -> stage 1"
        link = f"{kind} from {source}"
        occupied.append(task if task.worker.startswith("stage") else replace(task, worker=link))
    expected = makespan(run(occupied)) + (0.0 if blocking else 2 * sum(delays))
    assert dtfm.pipeline(through, setting, blocking) == pytest.approx(expected, rel=1e-9)


def test_dtfm_the_headline_is_a_product_and_its_parts_come_within_ten_percent() -> None:
    found, theirs = numbers(committed("dtfm")), dtfm.gains(dtfm.HEADLINE)
    whole, placement, overlap = theirs.values()
    assert whole == pytest.approx(placement * overlap)
    assert whole == pytest.approx(4.8, abs=0.05)
    for what, number in theirs.items():
        assert found[what] == pytest.approx(number, rel=0.1)


def test_swarm_the_trace_is_whole_and_a_fleet_keeps_its_nodes() -> None:
    fleet, present = swarm.Fleet(), set()
    for second, sign, node in swarm.events()[:40]:
        fleet.net.run(second / swarm.DEAD_AFTER)
        fleet.change(sign, node)
        present ^= {node}
        assert {*fleet.free, *(n for pipeline in fleet.pipelines for n in pipeline.nodes)} == present
        assert fleet.nodes == len(present)
        assert len(fleet.free) < swarm.STAGES


def test_karma_and_rannc_stay_on_their_devices() -> None:
    for blocks in karma.MODELS.values():
        batch = karma.largest_batch(blocks)
        assert karma.offloaded(blocks, batch // 2) == pytest.approx(3 * batch // 2 * forward(blocks), rel=0.02)
        assert karma.spilled(blocks, batch) >= 4 * batch * forward(blocks)
    assert rannc.spilled().peak_bytes < rannc.DEVICE_BYTES / 4
    assert rannc.largest(1) < rannc.largest(2) < rannc.largest(4)


def forward(blocks: tuple[karma.Block, ...]) -> float:
    """Seconds of an image."""
    return sum(block.flop for block in blocks) / karma.FLOPS


def test_ravnest_is_linear_within_a_hundredth_and_uneven_clusters_gain_less() -> None:
    found = committed("ravnest")
    assert all(0.99 < ratio < 1.01 for ratio in numbers(found, "ratios").values())
    even, uneven = numbers(found).values(), numbers(found, "further").values()
    # More than waiting for the slowest would.
    assert all(n / ravnest.SLOWEST < u < e for n, u, e in zip(ravnest.CLUSTERS, uneven, even, strict=True))


def test_gossip_two_numbers_of_all_reduce_are_met_and_the_others_are_not_used() -> None:
    models = gossip.calibrated()
    for model in models:
        table = model.cluster.table
        for workers in (min(table), max(table)):
            assert model.all_reduce(workers) == pytest.approx(table[workers][0], rel=1e-3)
    assert len(gossip.held_out(models)) == 30


def test_gossip_the_order_of_methods_needs_trees_and_flows_of_their_own() -> None:
    found = numbers(committed("gossip"), "further")
    assert found["order of three methods right, of 9"] == 9
    assert found["the same by bytes of rings that share the card"] < 9
    assert found["median error of the numbers held out"] < found["median error if all took as long as all-reduce"]


def test_gossip_four_flows_leave_no_time_to_compute() -> None:
    """Of three steps of 8 A40's exponential graph one crosses nodes, with four messages through each card."""
    crossing = 1e3 * 4 * gossip.PARAMETER_BYTES / (25e9 / 8)
    computing = (3 * gossip.CLUSTERS[-1].table[8][2] - crossing) / 2
    assert computing == pytest.approx(18, abs=0.5)


def test_one_peer_graphs_are_exact_after_log2_n_rounds_and_static_ones_are_not() -> None:
    assert all(onepeer.rounds(onepeer.OnePeerExponential(), n) == n.bit_length() - 1 for n in onepeer.WORKERS)
    assert onepeer.rounds(onepeer.Exponential(), 8) > 8


def test_pushsum_a_code_changes_no_rate_and_the_graph_is_directed() -> None:
    found = numbers(committed("pushsum"))
    assert found["error with codes over error without, 800 steps"] == pytest.approx(1, abs=0.01)
    assert -0.6 < found["exponent of T, 4-bit codes of differences"] < -0.5
    degrees = {len(step_graph(pushsum.directed(8), 8, 0).targets[rank]) for rank in range(8)}
    assert len(degrees) > 1


def test_serverless_the_direction_is_adams() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer, ours, sum_of_ours = torch.optim.Adam([parameter], lr=1.0), serverless.Adam(), torch.zeros(3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        parameter.grad = torch.randn(3, generator=draw)
        sum_of_ours += ours(parameter.grad) / serverless.NOISE
        optimizer.step()
    assert torch.allclose(parameter.detach(), -sum_of_ours, atol=1e-5)


def test_accumadam_a_rate_that_is_off_takes_most_of_all_reduces_lead() -> None:
    found = numbers(committed("accumadam"), "further")
    best = found["lead of all-reduce, each at its best rate"]
    assert best == pytest.approx(
        found["ring, Adam, rate 0.003: loss"] - found["all-reduce, Adam, rate 0.003: loss"], abs=2e-3
    )
    off = [found[f"lead of all-reduce at rate {rate} over the others at their best"] for rate in ("0.001", "0.009")]
    assert 0 < min(off) < 0.4 * best
    assert min(off) < max(off) < 0.7 * best
    ahead = [found[f"lead of AccumAdam over Adam on the ring, rate {rate}"] for rate in ("0.001", "0.003", "0.009")]
    assert ahead[0] > 0.1 > 0 > max(ahead[1:])
    measured = json.loads(accumadam.MEASURED.read_text())["losses"]
    assert {name: len(losses) for name, losses in measured.items()} == dict.fromkeys(accumadam.METHODS, 3)


@pytest.mark.timeout(180)
def test_accumadam_a_short_run_gives_its_measured_loss_again() -> None:
    """16 workers, through the first window of AccumAdam on the ring."""
    measured = json.loads(accumadam.MEASURED.read_text())["short"]
    again = accumadam.loss(accumadam.METHODS["ring, AccumAdam"], 1.0, accumadam.SHORT)
    assert again == pytest.approx(measured["ring, AccumAdam"], abs=2e-3)
    assert len(set(measured.values())) == len(accumadam.METHODS)


def test_accumadam_counts_pairs() -> None:
    scores = accumadam.THEIRS["BLEU En-De"]
    assert accumadam.pairs_in_order({name: -score for name, score in scores.items()}, scores) == 6
    assert accumadam.pairs_in_order(scores, scores) == 0


def test_consensus_control_brings_a_ring_nearer_to_all_reduce_and_takes_rounds_for_it() -> None:
    found = numbers(committed("consensus"), "further")
    steps = [found[f"target {target}: steps over all-reduce's"] for target in (0.1, 0.05, 0.01)]
    rounds = [found[f"target {target}: rounds a step"] for target in (0.1, 0.05, 0.01)]
    assert found["ring without control: steps over all-reduce's"] > steps[0] >= steps[1] >= steps[2]
    assert 1 < rounds[0] < rounds[1] < rounds[2]
