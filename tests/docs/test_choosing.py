"""The page that says what to take when shows the committed results, and no other number."""

import re

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from lightning_decentral.gossip import Elastic
from pages import choosing
from pages.choosing import rows
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "choosing.md").read_text()


@pytest.mark.parametrize("table", choosing.TABLES, ids=lambda table: table.__name__)
def test_the_page_shows_the_committed_tables(table) -> None:  # type: ignore[no-untyped-def]
    assert table() in PAGE


def prose() -> str:
    """Without the tables that are printed, and without code and links."""
    text = PAGE
    for table in choosing.TABLES:
        text = text.replace(table(), "")
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def test_the_prose_has_no_number_of_its_own() -> None:
    """Settings of the measurements, as they are committed; counts of hosts, seeds and buckets."""
    speed, hosts = (ROOT / "benchmarks" / "results" / f"cluster-{name}-2-cores.json" for name in ("speed", "accuracy"))
    rates = {re.sub(r"\D", "", row["rate"]) for row in rows("cluster-speed-2-cores")}
    assert rates == {"200", "400", "1"}
    named = {"4"}  # of the method "ddp, 4 MB buckets"
    assert "ddp, 4 MB buckets" in choosing.METHODS
    stragglers = {row["straggler or model"] for row in rows("cluster-speed-2-cores")} & {"3"}
    sizes = {row["hosts"] for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"}
    model = {f"{4 * int(number(speed, 'parameters')) / 1e6:.1f}", f"{number(speed, 'compute'):g}"}
    assert '"rate": "200mbit"' in hosts.read_text()
    sizes |= {choosing.SIZES[0], choosing.SIZES[-1]}
    text = {*re.findall(r"\d+", " ".join(choosing.WRITTEN.values())), "256"}  # tokens: 4 rows of 64 in conf/data/pydoc
    assert set(re.findall(r"\d+(?:\.\d+)?", prose())) <= rates | named | stragglers | sizes | model | text


def test_a_silent_worker_is_dead_when_the_page_says() -> None:
    seconds = Elastic(lobby="127.0.0.1:1").dead_after
    assert f"{seconds:g} s of silence" in choosing.questions()


def number(path, name: str) -> float:  # type: ignore[no-untyped-def]
    (found,) = re.findall(rf'"{name}": ([\d.]+)', path.read_text())
    return float(found)


def cells() -> dict[tuple[str, str], dict[str, float]]:
    found = {}
    for row in rows("cluster-accuracy-2-cores"):
        target = {"resnet": "0.97", "gpt": "1.45", "larger-gpt": "2.5"}[row["title"].partition(":")[0]]
        last = next(value for head, value in row.items() if head.endswith("at the end"))
        seconds = float(row[target].partition(" s")[0])
        found[row["title"].partition(":")[0], row["method"]] = {"seconds": seconds, "end": float(last)}
    return found


@pytest.mark.thorough
def test_what_it_recommends_composes() -> None:
    words = re.findall(r"`((?:\+?strategy|optimizer|experiment)[^`]*=[^`]*)`", PAGE)
    assert len(words) > 8
    for line in words:
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            kind = {"optimizer": ["strategy=ddp"], "strategy/": ["strategy=gossip"]}.get(line[:9], [])
            said = [*kind, *line.split()]
            instantiate(compose("train", said).strategy, _convert_="all")


def test_what_is_recommended_is_what_was_ahead() -> None:
    """The sentences of the first table, as comparisons of the committed numbers."""
    accuracy = cells()
    speed = {
        (row["hosts"], row["rate"], row["method"]): float(row["s per step"])
        for row in rows("cluster-speed-2-cores")
        if row["straggler or model"] == "1"
    }
    for rate in ("200mbit", "400mbit"):
        assert min((s, m) for (n, r, m), s in speed.items() if (n, r) == ("8", rate) and m in choosing.METHODS)[1] == (
            "gossip, int8"
        )
    means = {(row["recipe"], row["run"]): float(row["mean ± deviation"].split()[0]) for row in rows("quality-2-cores")}
    assert max((means[key], key) for key in choosing.EQUAL_STEPS if key[0] == "resnet")[1][1] == "ddp"
    ratios = []
    for size in choosing.SIZES:
        ddp, gossip, codes = (speed[size, "200mbit", method] for method in ("ddp", "gossip", "gossip, int8"))
        assert codes < gossip < ddp
        ratios.append(ddp / gossip)
    assert ratios == sorted(ratios)
    assert speed["8", "1gbit", "gossip, int8"] > speed["8", "1gbit", "gossip"]
    assert speed["8", "1gbit", "ddp, 4 MB buckets"] < speed["8", "1gbit", "ddp"]
    assert min((v["seconds"], k[1]) for k, v in accuracy.items() if k[0] == "resnet")[1] == "gossip, int8"
    slow = {row["method"]: float(row["times faster than ddp"]) for row in rows("cluster-speed-2-cores")
            if row["straggler or model"] == "3"}  # fmt: skip
    assert max(slow, key=slow.__getitem__) == "gossip, delay 4"


def soonest(recipe: str, page: str = "") -> dict[str, list[str]]:
    """{rate: methods, the soonest at the loss of `ddp` first}"""
    reached = [r for r in choosing.by_rate(recipe, "times sooner than `ddp` ", page) if r["200mbit"]]
    found = {rate: [r for r in reached if r.get(rate, "-") != "-"] for rate in choosing.WRITTEN}
    return {rate: [r["method"] for r in sorted(of, key=lambda row, rate=rate: -float(row[rate]))]
            for rate, of in found.items()}  # fmt: skip


def test_what_is_recommended_for_text_was_the_soonest() -> None:
    small, wide = soonest("gpt"), soonest("gpt-1024-tokens")
    outer, streamed = "outer rounds of 8, int4, Muon", "streamed outer rounds of 8, int4, Muon"
    differences = "gossip, int4 differences, Muon"
    accumulating = "ddp, Muon, fp16 hook, accumulating 4"
    assert small["10mbit"][:2] == [streamed, outer]
    assert {streamed, outer, differences} == {*small["50mbit"][:3]}
    for rate in ("10mbit", "50mbit"):
        assert small[rate].index(accumulating) > max(map(small[rate].index, (streamed, outer, differences)))
    assert small["200mbit"][:2] == small["1gbit"][:2] == [accumulating, outer]
    plain, shared = "compressed, int8, Muon", "compressed, int8, Muon shared out"
    for rate in choosing.WRITTEN:
        assert (small[rate].index(shared) < small[rate].index(plain)) == (rate in ("200mbit", "1gbit"))
    assert [soonest("sympy")[rate][0] for rate in choosing.WRITTEN] == [streamed, outer, outer, outer]
    of_all, codes = "ddp, Muon, fp16 hook", "gossip, int8, Muon"
    larger, sixteen = soonest("larger-gpt", "larger-gpt-"), soonest("gpt", "16-hosts-")
    assert [larger[rate][0] for rate in choosing.WRITTEN] == [streamed, codes, codes, of_all]
    assert [sixteen[rate][0] for rate in choosing.WRITTEN if sixteen[rate]] == [codes, of_all, of_all]
    assert [wide[rate][0] for rate in choosing.WRITTEN] == [streamed, outer, "compressed, int8, Muon", of_all]


def losses(recipe: str, page: str = "") -> dict[str, float]:
    return {row["method"]: float(row[head].split()[0]) for row in choosing.by_rate(recipe, "", page)
            for head in row if head.endswith("at the end")}  # fmt: skip


def test_what_the_page_says_of_codes_that_owners_add_up() -> None:
    outer, streamed = "outer rounds of 8, int4, Muon", "streamed outer rounds of 8, int4, Muon"
    fewer, told, owned = "outer rounds of 4, int4, Muon", losses("gpt"), losses("gpt", "owners-")
    assert all(abs(told[method] - owned[method]) < 0.01 for method in (outer, streamed))
    assert owned[fewer] < min(owned[outer], owned[streamed])
    bytes_sent = [
        {
            row["method"]: float(row["MB sent per step"])
            for row in choosing.by_rate("gpt", "", page)
            if "MB sent per step" in row
        }
        for page in ("", "owners-")
    ]
    assert 1.9 < bytes_sent[0][outer] / bytes_sent[1][outer] < 2.1
    assert bytes_sent[1][fewer] == pytest.approx(bytes_sent[0][outer], rel=0.05)
    by_rate = soonest("gpt", "owners-")
    assert all(by_rate[rate].index(streamed) > by_rate[rate].index(outer) for rate in choosing.WRITTEN)
    assert by_rate["10mbit"][0] == outer


def test_the_least_loss_is_what_the_page_says() -> None:
    small, wide = losses("gpt"), losses("gpt-1024-tokens")
    order = sorted(small, key=small.__getitem__)
    averages = {"compressed, int8, Muon", "compressed, int8, Muon shared out"}
    assert order[:2] == ["ddp, Muon, fp16 hook", "ddp, Muon"]
    assert {*order[2:4]} == averages
    assert wide["compressed, int8, Muon"] == wide["ddp, Muon, fp16 hook"] == min(wide.values())
