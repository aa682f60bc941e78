"""`lightning-decentral plan`: what is compared, what is recommended, and that it can be trained as printed."""

import re
import shlex
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.gossip import Auto, GossipForecast, Int8, Ring
from lightning_decentral.gossip.plan.step_costs import ReplicatedCost
from lightning_decentral.gossip.plan.topology import topology
from lightning_decentral.pipeline import Pipelining
from lightning_decentral.planner.candidates import Candidate, candidates
from lightning_decentral.planner.compare import _best, chosen, losses_of, plan
from lightning_decentral.planner.forecasts import encoding_of, method_of, strategy_of
from lightning_decentral.planner.show import digits, sentences, times, verdict
from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan import data_parallel, units
from lightning_decentral.shared.plan.data_parallel import DataParallel, ShardedForecast
from lightning_decentral.shared.plan.forecast import Cluster, Setting, even
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Model, Profile, RoundWork, read, write
from lightning_decentral.shared.plan.timeline import makespan, run
from lightning_decentral.shared.plan.units import shown_bytes
from tests.settings import links, model, setting

CLUSTER = Cluster(8, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("candidate", [*candidates(CLUSTER, model())], ids=lambda c: c.overrides)
def test_every_candidate_composes_as_a_command_of_the_recipes(candidate) -> None:  # type: ignore[no-untyped-def]
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", candidate.overrides.split())
    assert type(instantiate(cfg.strategy, _convert_="all")) in {
        DDPStrategy,
        GossipStrategy,
        CompressedStrategy,
        PartialBackpropStrategy,
        TokenPipelineStrategy,
    }


def test_words_become_the_methods_that_they_name() -> None:
    def method(words: str) -> object:
        return method_of(strategy_of(words), CLUSTER, 1)

    assert method("strategy=ddp") == DataParallel()
    assert method("strategy=gossip strategy/island=fully_shard strategy.island.devices=8") == ShardedForecast()
    assert method("strategy=gossip strategy/topology=ring strategy.delay=0") == GossipForecast(Ring(), 0)
    assert method("strategy=gossip") == GossipForecast(Auto(4))
    island = method("strategy=gossip strategy/island=all_reduce strategy.island.devices=4")
    assert island == GossipForecast(Auto(1), within=ReplicatedCost(4))


def test_only_what_this_device_wasnt_timed_for_is_remarked() -> None:
    timed = replace(model(), rounds=(RoundWork("Int8(block=256)"), RoundWork("BFloat16()")))

    def remarked(of: Model) -> set[str]:
        return {c.title for c in candidates(CLUSTER, of) if "one CPU thread" in c.remark}

    four = {"compressed, int4", "streamed outer rounds, int4"}
    eight = {"compressed, int8", "gossip, int8", "gossip, islands, int8"}
    assert remarked(model()) == {*four, *eight, "gossip, bfloat16"}
    assert remarked(replace(timed, rounds=timed.rounds[:1])) == {*four, "gossip, bfloat16"}
    assert remarked(timed) == four
    assert remarked(replace(timed, rounds=(*timed.rounds, RoundWork("Int4(block=128)")))) == set()


def test_a_codec_counts_its_own_bytes() -> None:
    assert encoding_of(Int8()).wire_bytes(1024) == 256 + 4
    assert encoding_of(Int8(), copies=2).wire_bytes(1024) == 2 * 260


@pytest.mark.parametrize(("rate", "best"), [(1e7, "streamed outer rounds, int4"), (1.5e8, "gossip"), (1e12, "ddp")])
def test_the_slower_the_network_the_less_is_sent(rate: float, best: str) -> None:
    """16 MB and 128 ms: an all-reduce sends 28 MB, a message is 16 MB, 4 MB a step where only every fourth sends, and
    0.5 MB where a model goes to 7 others in 30 steps, in four bits."""
    found = plan(setting(rate=rate))
    assert found.best is not None
    assert found.best.candidate.title == best


def test_rows_are_sorted_and_measured_against_ddp() -> None:
    found = plan(setting(8, 4, rate=1e8), (0.8, 1.0, 1.2))
    seconds = [row.forecast.seconds for row in found.rows]
    assert seconds == sorted(seconds)
    assert found.speedup(found.baseline) == 1
    assert all(row.forecast.p50_seconds <= row.forecast.p95_seconds for row in found.rows)
    assert len(found.rows) + len(found.refused) == len(list(candidates(CLUSTER, model())))


def test_below_the_threshold_it_says_stay_with_ddp() -> None:
    where = setting(rate=3e8)
    gain = plan(where, threshold=0.0)
    assert gain.best is not None
    more = gain.speedup(gain.best) - 1
    assert more > 0.01
    assert not gain.stay
    stays = plan(where, threshold=1.1 * more)
    assert stays.stay
    assert any(line.startswith("stay with ddp") for line in verdict(stays))


def test_what_does_not_fit_is_not_recommended() -> None:
    where = setting(rate=1e8)
    found = plan(where, memory_bytes=40e6)
    assert found.best is not None
    assert found.best.candidate.title == "sharded over all"
    assert plan(where, memory_bytes=1e3).best is None
    assert "nothing fits" in next(verdict(plan(where, memory_bytes=1e3)))


def test_partial_backprop_is_shown_and_never_recommended() -> None:
    found = plan(setting(rate=1e12), threshold=0.0)
    assert found.rows[0].candidate.title == "partial backprop"
    assert found.best is not None
    assert found.best.method.equal
    asked = "strategy=partial_backprop strategy.depth.warm_up=0"
    with_words = plan(setting(rate=1e12), also=[asked], threshold=0.0)
    assert asked in [row.candidate.title for row in with_words.rows[:2]]
    assert with_words.best is not None
    assert with_words.best.method.equal


@pytest.mark.parametrize(
    ("threshold", "seconds", "best"),
    [
        (0.0, {"ddp": 1.015, "a": 1.0, "b": 1.01}, "a"),
        (0.0, {"ddp": 1.0, "a": 1.0, "b": 1.01}, "ddp"),
        (0.01, {"ddp": 1.015, "b": 1.01, "a": 1.0}, "a"),
        (0.02, {"ddp": 1.015, "a": 1.0, "b": 1.01}, "ddp"),
        (0.1, {"ddp": 1.11, "b": 1.015, "a": 1.0}, "a"),
        (0.1, {"ddp": 1.2, "b": 1.015, "a": 1.0}, "b"),
        (0.1, {"b": 1.03, "a": 1.0}, "a"),
    ],
)
def test_ddp_stays_only_where_nothing_gains_the_threshold(
    threshold: float, seconds: dict[str, float], best: str
) -> None:
    """Of those within 2 % of the fastest the first, if it gains the threshold itself."""
    found = [(Candidate("strategy=ddp" if title == "ddp" else title, title), s) for title, s in seconds.items()]
    choice = chosen(found, threshold)
    assert choice is not None
    assert choice.title == best


def test_a_cluster_that_a_topology_can_not_serve_is_told() -> None:
    found = plan(setting(6), also=["strategy=gossip strategy/topology=hypercube"])
    assert "power of two" in found.refused["strategy=gossip strategy/topology=hypercube"]
    assert "6 stages for a model of 4 blocks" in found.refused["pipelines of 6"]


def test_embedding_and_head_of_a_profile_are_no_blocks_of_a_pipeline() -> None:
    """A stage needs one of the numbered blocks, as in training, which refuses what a plan would else recommend."""
    names = ("inputs", "h.0", "h.1", "h.2", "h.3", "ln_f")
    blocks = tuple(replace(one, name=name) for one, name in zip(model(6).blocks, names, strict=True))
    where = replace(setting(6), model=replace(model(6), blocks=blocks))
    with pytest.raises(ValueError, match="6 stages for a model of 4 blocks: use 1 to 4 stages"):
        Pipelining().memory_bytes(where)
    parts = Pipelining(stages=3)._parts(where)
    assert [[one.name for one in part] for part in parts] == [["inputs", "h.0"], ["h.1", "h.2"], ["h.3", "ln_f"]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("strategy=token_pipeline strategy/replicas=gossip_replicas", "strategy/replicas"),
        ("strategy=token_pipeline strategy/activations=recompute", "strategy/activations"),
        ("strategy=token_pipeline strategy/slicing=given strategy.slicing.lengths=[2,2]", "strategy.slicing.n=1"),
        ("strategy=partial_backprop strategy.cuts=3", "strategy.cuts 3"),
    ],
)
def test_what_no_forecast_reads_is_refused(words: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"no forecast reads .*{re.escape(reason)}"):
        method_of(strategy_of(words), CLUSTER, 1)


@pytest.mark.parametrize("schedule", ["tera_pipe", "one_forward_one_backward", "zero_bubble"])
def test_pipelines_are_their_words(schedule: str) -> None:
    words = f"strategy=token_pipeline strategy.stages=4 strategy/schedule={schedule} strategy/slicing=uniform"
    method = method_of(strategy_of(f"{words} strategy.slicing.n=3"), CLUSTER, 1)
    assert isinstance(method, Pipelining)
    assert method.slices == 3
    where = replace(setting(8, 4), model=model(update=0)).without_network
    assert makespan(run(method.tasks(where))) == pytest.approx(float(method.seconds(where, even(8))[0]))


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write(Profile(model(), links(rate=1e8).costs, (0.9, 1.0, 1.1)), path)
    return path


def test_the_command_prints_a_line_that_trains(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", str(profile), "--workers", "8", "--per-node", "4"])
    printed = capsys.readouterr().out
    assert "predicted for 8 workers on 2 nodes" in printed
    line = printed.strip().splitlines()[-1]
    assert line.startswith("python recipes/train.py recipe=vit strategy=gossip")
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", line.split()[2:])
    assert (cfg.trainer.num_nodes, cfg.trainer.devices) == (2, 4)
    assert isinstance(instantiate(cfg.strategy, _convert_="all"), GossipStrategy)


def test_the_command_keeps_every_word_as_a_shell_reads_it(tmp_path: Path) -> None:
    words = ("recipe=vit", "~scheduler", "data.source=a b")
    write(Profile(replace(model(), words=words), links().costs), tmp_path / "p.json")
    where = replace(setting(), model=read(tmp_path / "p.json").model)
    assert tuple(shlex.split(plan(where).command)[:3]) == words
    assert plan(replace(where, model=replace(model(), words=()))).command.startswith("strategy=")


MATRICES = ((96, 96), (96, 384))


def profiled(optimizer: str, workers: int = 8) -> Setting:
    """A setting whose model has hidden matrices in each block."""
    blocks = tuple(replace(block, hidden=MATRICES) for block in model().blocks)
    words, states = ("recipe=gpt", "trainer=cpu"), (("exp_avg", 8), ("exp_avg_sq", 8))
    known = replace(model(), blocks=blocks, words=words, optimizer=optimizer, states=states, products_per_second=1e9)
    return replace(setting(workers), model=known)


@pytest.mark.thorough
def test_every_line_composes_and_names_strategy_codec_rule_and_optimizer() -> None:
    """As a shell and Hydra read it; what is named besides is what the words alone make."""
    planned = plan(profiled("adamw"), optimizer="muon")
    assert len(planned.rows) > 10
    for row in planned.rows:
        said = shlex.split(replace(planned, best=row).command)
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            cfg, alone = compose("train", said), compose("train", row.candidate.overrides.split())
        assert cfg.optimizer._target_.endswith(".Muon")
        assert cfg.strategy == alone.strategy
        if any(one.startswith("experiment=") for one in said):
            continue
        assert said.count("optimizer=muon") == 1
        named = {word.partition("=")[0] for word in said}
        gossip, compressed = "strategy=gossip" in said, "strategy=compressed" in said
        assert {"strategy", "optimizer"} <= named
        assert ("strategy/codec" in named) == (gossip or compressed)
        assert ("strategy/combine" in named) == gossip


def test_the_line_names_the_optimizer_that_was_profiled() -> None:
    assert "optimizer=adamw" in plan(profiled("adamw")).command.split()
    assert "optimizer=" not in plan(profiled("")).command
    asked = replace(profiled("adamw").model, words=("recipe=gpt", "optimizer=adamw", "optimizer.lr=1e-3"))
    command = plan(replace(profiled("adamw"), model=asked)).command.split()
    assert [word for word in command if "optimizer" in word] == ["optimizer=adamw", "optimizer.lr=1e-3"]


def test_where_losses_are_known_the_soonest_at_the_loss_is_named() -> None:
    """Muon's products cost nothing here; of AdamW's batches `ddp` with it needs 0.54, outer rounds 0.77."""
    free = replace(profiled("adamw").model, products_per_second=1e15)
    for rate, best in ((1e12, "ddp, Muon, fp16 hook"), (1e5, "outer rounds of 8, int4, Muon")):
        found = plan(replace(profiled("adamw"), model=free, network=links(rate=rate)))
        assert found.known is not None
        assert found.known.workers == 8
        assert found.best is not None
        assert found.best.candidate.title.removeprefix("streamed ") == best
        assert found.stay == best.startswith("ddp")
        words = found.command.split()
        assert sum(word.startswith(("optimizer=", "experiment=")) for word in words) == 1
        shares = [row.to_loss for row in found.rows]
        assert shares == sorted(shares)
        assert found.baseline.share == 1
    assert plan(replace(profiled("adamw"), model=replace(free, words=()))).known is None
    assert plan(replace(profiled("adamw"), model=replace(free, words=())), like="text").known is not None
    assert plan(replace(profiled("sgd"), model=replace(free, optimizer="sgd"))).known is None


def test_a_loss_is_that_of_the_very_overrides_that_were_measured() -> None:
    known = losses_of(profiled("adamw", 4))
    assert known is not None
    asked = known.overrides["gossip, int8, Muon"]
    muon = plan(profiled("adamw", 4), optimizer="muon", also=[asked])
    shares = {row.candidate.title: row.share for row in muon.rows}
    assert shares["gossip, int8"] is None  # momentum 0.8, and 0.9 was measured
    assert shares["gossip, int8, Muon"] == shares[asked]
    assert shares["ddp"] not in (None, 1.0)
    accumulated = profiled("accum_adamw", 16)
    assert plan(accumulated).baseline.share is None  # not measured on 16 workers


def test_what_is_known_not_to_reach_a_loss_is_not_recommended_by_its_steps() -> None:
    rows = [(Candidate("strategy=ddp", "ddp"), 1.0, inf, 2.0), (Candidate("fast", "fast"), 0.1, inf, 1.0)]
    best = _best(rows, 0.1)
    assert best is not None
    assert best.title == "ddp"
    unknown = _best([*rows, (Candidate("unknown", "unknown"), 0.5, None, 1.0)], 0.1)
    assert unknown is not None
    assert unknown.title == "unknown"


def test_why_losses_rank_nothing_is_the_reason_that_holds() -> None:
    sgd = replace(profiled("sgd").model, optimizer="sgd")
    assert "no loss was measured with sgd" in " ".join(verdict(plan(replace(profiled("sgd"), model=sgd), like="text")))
    own = replace(profiled("adamw"), model=replace(profiled("adamw").model, words=()))
    assert "--like gpt, vit or resnet" in " ".join(verdict(plan(own)))
    known = losses_of(profiled("adamw", 8))
    assert known is not None
    assert not known.is_far(2 * known.workers, 8 * known.parameter_bytes)
    assert known.is_far(3 * known.workers, 1)
    assert known.is_far(1, 9 * known.parameter_bytes)
    assert any("far from your setting" in line for line in sentences(plan(profiled("adamw", 64))))


def test_another_optimizer_is_charged_to_every_method() -> None:
    """4 blocks: 5 (4 s^2 l + 2 s^3) operations for each of their matrices, at 1e9 a second."""
    adam, muon = plan(profiled("adamw")), plan(profiled("adamw"), optimizer="muon")
    products = 4 * sum(5 * (4 * s * s * long + 2 * s**3) for s, long in MATRICES) / 1e9
    assert products > 0.05
    assert muon.baseline.forecast.even_seconds - adam.baseline.forecast.even_seconds == pytest.approx(products)
    assert {row.candidate.title for row in muon.rows} - {row.candidate.title for row in adam.rows} == {
        "gossip, int8, momentum too"
    }
    own = replace(
        profiled("adamw"), model=replace(profiled("adamw").model, words=())
    )  # a model whose losses nobody knows
    said = " ".join(verdict(plan(own)))
    assert "Adam takes smaller steps under gossip" in said
    assert f"Muon would take {1e3 * products:.3g} ms a step more: --optimizer muon" in said
    gossip = next(row for row in muon.rows if row.candidate.title == "gossip")
    assert "tune optimizer.lr" in " ".join(verdict(replace(muon, best=gossip)))
    assert not any("Muon" in line for line in verdict(plan(setting())))


def test_the_command_plans_with_another_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    write(Profile(profiled("adamw").model), path)
    cli.main(["plan", str(path), "--workers", "8", "--bandwidth", "200mbit", "--optimizer", "muon"])
    assert re.search(r" (optimizer=|experiment=\w+_)muon ", capsys.readouterr().out.strip().splitlines()[-1])
    with pytest.raises(SystemExit, match="error: this profile, of adamw, doesn't show what sgd costs"):
        cli.main(["plan", str(path), "--workers", "8", "--bandwidth", "200mbit", "--optimizer", "sgd"])


def test_links_of_the_command_line_take_the_place_of_measurements(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(
        ["plan", str(profile), "--workers", "8", "--bandwidth", "100gbit", "--latency", "5us", "--threshold", "15"]
    )
    assert "stay with ddp" in capsys.readouterr().out
    write(Profile(model()), profile)
    cli.main(["plan", str(profile), "--workers", "8", "--bandwidth", "200mbit"])
    assert "~ priced from --bandwidth, not measured\n" in capsys.readouterr().out


def test_it_says_where_prices_come_from() -> None:
    def said(where: Setting) -> list[str]:
        return [*sentences(plan(where))]

    card = Network(()).linked("between", 1e-4, 1e9)
    too_dear = "links inside a node priced like the network card, which is too slow: give --inside-bandwidth 200gbit"
    only = replace(setting(8, 4), network=card)
    assert too_dear in said(only)
    assert "~ priced from --bandwidth, not measured" in said(only)
    assert too_dear not in said(replace(setting(8), network=card))
    both = replace(only, network=card.linked("inside", 1e-5, 1e10))
    assert too_dear not in said(both)
    assert "~ priced from --bandwidth and --inside-bandwidth, not measured" in said(both)
    extrapolated = "extrapolated: not measured on groups of this size"
    assert f"~ {extrapolated}" in said(setting(8, 4))
    part = replace(only, network=links().linked("between", 1e-4, 1e9))
    assert f"~ priced from --bandwidth, not measured, or {extrapolated}" in said(part)
    where = "the same line on each of 2 hosts, with NODE_RANK, MASTER_ADDR, MASTER_PORT (docs/cluster.md): they meet"
    assert f"{where} at MASTER_ADDR, and one alone waits for the other 1" in said(only)
    assert not any("hosts, with NODE_RANK" in line for line in said(setting(4, 4)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "1"], "--workers must be at least 2, got 1: one worker exchanges with nobody"),
        (["--workers", "10", "--per-node", "4"], "--workers 10 isn't a multiple of --per-node 4"),
        (["--workers", "8", "--also", "strategy=coffee"], "'strategy=coffee' can't be composed"),
        (["--workers", "8", "--also", "delay=4"], "must have one strategy="),
        ([], "plan needs a profile and --workers"),
    ],
)
def test_mistakes_are_one_line(profile: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$") as error:
        cli.main(["plan", str(profile), *words])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("option", "word", "message"),
    [
        ("--bandwidth", "fast", "'fast' isn't a rate such as 200mbit"),
        ("--bandwidth", "0mbit", "'0mbit' isn't a rate such as 200mbit"),
        ("--bandwidth", "1e400mbit", "'1e400mbit' isn't a rate such as 200mbit"),
        ("--bandwidth", "1e308gbit", "'1e308gbit' isn't a rate such as 200mbit"),
        ("--latency", "100", "'100' isn't a time such as 100us"),
        ("--memory-bytes", "0GB", "'0GB' isn't a size"),
    ],
)
def test_a_wrong_quantity_names_its_option(
    profile: Path, option: str, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", str(profile), "--workers", "8", option, word])
    assert capsys.readouterr().err.startswith(f"error: argument {option}: {message}")


def test_a_far_extrapolation_shows_no_more_digits_than_it_knows() -> None:
    assert [digits(value) for value in (57.246, 0.0, 9999.6, 1687307.4)] == ["57.25", "0", "10000", "1687000"]
    assert [times(ratio) for ratio in (0.5, 99.99, 2385.69)] == ["0.50", "99.99", "2390"]


def test_a_foreign_or_damaged_profile_and_no_network_are_named(profile: Path) -> None:
    write(Profile(model()), profile)
    with pytest.raises(SystemExit, match="nothing was measured between nodes"):
        cli.main(["plan", str(profile), "--workers", "8"])
    for text, message in (("{}", "not a profile of this package"), ("{", "no JSON")):
        profile.write_text(text)
        with pytest.raises(SystemExit, match=message):
            cli.main(["plan", str(profile), "--workers", "8"])


def test_one_node_needs_no_network_between(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = tuple(cost for cost in links().costs if cost.reach == "inside")
    write(Profile(model(), inside), profile)
    cli.main(["plan", str(profile), "--workers", "4", "--per-node", "4"])
    assert "4 workers on 1 node" in capsys.readouterr().out


def test_it_says_what_share_of_a_step_a_round_takes_the_device() -> None:
    """Bytes times what was measured for a byte, of its own and of one neighbour's; in one of four steps."""
    timed = replace(setting(8), model=replace(model(), rounds=(RoundWork("Plain()", 2e-10, 1e-10),)))
    found = plan(timed)
    (line,) = [line for line in sentences(found) if line.startswith("a round takes the device itself")]
    assert found.best is not None
    assert found.best.candidate.title == "gossip every 4, delay 4"
    seconds = (2e-10 + 1e-10) * timed.model.parameter_bytes / 4
    share = f"{1e3 * seconds:.3g} ms, {100 * seconds / found.best.forecast.seconds:.2g} % of a step, counted"
    assert line.endswith(f"gossip every 4, delay 4 {share}")
    assert not [line for line in sentences(plan(setting(8))) if line.startswith("a round takes")]


def test_units() -> None:
    assert units.bytes_per_second("200mbit") == 25e6
    assert units.seconds("100us") == pytest.approx(1e-4)
    assert units.size_bytes("24GB") == 24e9
    for size in (1.0, 999.6, 1e3, 255e3, 12.1e6, 999.9e6, 24e9, 1.5e12):
        assert units.size_bytes(shown_bytes(size)) == pytest.approx(size, rel=5e-3), "what is printed is read"
    assert units.size_bytes("1000") == 1000
    assert [shown_bytes(size) for size in (0, 999, 12.3e6, 1.49e9)] == ["0", "999 B", "12.3 MB", "1.49 GB"]


def test_more_of_the_same_measured_is_no_extrapolation() -> None:
    ring = links().costs[0]
    where = Setting(model(), replace(links(), costs=(replace(ring, operation="all_reduce", workers=8),)), Cluster(8))
    rows = {row.candidate.title: row.forecast.extrapolated for row in plan(where).rows}
    assert not rows["ddp"]
    assert rows["gossip"]
    where = Setting(model(), replace(links(), costs=(replace(ring, workers=8),)), Cluster(8))
    rows = {row.candidate.title: row.forecast.extrapolated for row in plan(where).rows}
    assert rows["ddp"]
    assert not rows["gossip"]


@pytest.mark.parametrize("per_node", [1, 8])
def test_a_million_workers_cost_a_plan_what_two_hundred_do(per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a part of the workers only, as many timelines, and each candidate is named before it is forecast."""
    asked, timelines = [], []
    graph, timeline = topology._step_graph, data_parallel.run
    monkeypatch.setattr(topology, "_step_graph", lambda of, size, phase: asked.append(size) or graph(of, size, phase))
    monkeypatch.setattr(data_parallel, "run", lambda tasks: timelines.append(len(tasks)) or timeline(tasks))
    counts, titles = [], list[str]()
    for workers in (200, 1_000_000):
        timelines.clear()
        found = plan(setting(workers, per_node), [1.0, 1.5], say=titles.append)
        counts.append((len(timelines), sum(timelines)))
    assert max(asked) <= 200
    assert counts[0] == counts[1]
    assert {row.candidate.title for row in found.rows} <= set(titles)
    assert any("of 1000000 workers are an estimate: " in line for line in sentences(found))
    assert not any("are an estimate" in line for line in sentences(plan(setting(64))))
    assert found.baseline.forecast.card_bytes == 2 * (1 - 1e-6) * found.setting.model.parameter_bytes
