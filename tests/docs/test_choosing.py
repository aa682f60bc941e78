"""The page that says what to take when shows the committed results, and no other number."""

import re
import shlex
from statistics import mean

import pytest

from lightning_decentral.gossip import Elastic
from lightning_decentral.shared.plan.known_losses import known_losses
from pages import choosing, known
from pages.choosing import rows
from tests.docs.pages import ROOT
from tests.docs.test_shell_blocks import check

PAGE = (ROOT / "docs" / "choosing.md").read_text()
COMMANDS = sorted({*re.findall(r"`(python [^`]+)`", PAGE)})
OUTER, STREAMED = choosing.OUTER, f"streamed {choosing.OUTER}"
DDP = "ddp, Muon, fp16 hook"


@pytest.mark.parametrize("table", choosing.TABLES, ids=lambda table: table.__name__)
def test_the_page_shows_the_committed_tables(table) -> None:  # type: ignore[no-untyped-def]
    assert table() in PAGE


def test_it_is_short() -> None:
    assert len(PAGE.split()) <= 1250


def test_every_row_has_one_command_one_number_and_one_reason() -> None:
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for table in choosing.TABLES
             for line in table().splitlines()[2:]]  # fmt: skip
    typed = [row for row in cells if not any("the table below" in cell for cell in row)]
    assert len(typed) == len(cells) - 1 > 15
    assert all(sum(cell.startswith("`python ") for cell in row) == 1 for row in typed)
    assert all(re.search(r"\d", row[-2]) and row[-1] for row in typed)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_it_tells_to_type_names_what_exists(command: str) -> None:
    assert len(COMMANDS) > 15
    check(shlex.split(command))


def prose() -> str:
    """Without the tables that are printed, and without code and links."""
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    for table in choosing.TABLES:
        text = text.replace(table(), "")
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def test_the_prose_has_no_number_of_its_own() -> None:
    """Rates and hosts that were measured, sizes of a batch, and the question of a reader: 100 Mb/s."""
    rates = {*re.findall(r"\d+", " ".join(choosing.WRITTEN.values()))}
    hosts = {found for name in ("8-hosts", "16-hosts") for found in re.findall(r"\d+", name)}
    batches = {"256", choosing.LARGE.partition("=")[2]}  # tokens: 4 rows of 64 in conf/data/pydoc
    assert all(choosing.by_rate("gpt", "times sooner", f"{number}-hosts-") for number in hosts)
    assert set(re.findall(r"\d+(?:\.\d+)?", prose())) <= rates | hosts | batches | {"100"}


def test_a_silent_worker_is_dead_when_the_page_says() -> None:
    seconds = Elastic(lobby="127.0.0.1:1").dead_after
    assert f"{seconds:g} s of silence" in choosing.questions()


def losses(recipe: str, page: str = "") -> dict[str, float]:
    return {row["method"]: float(row[head].split()[0]) for row in choosing.by_rate(recipe, "", page)
            for head in row if head.endswith("at the end")}  # fmt: skip


def soonest(recipe: str, page: str = "") -> dict[str, list[str]]:
    """{rate: methods, the soonest at the loss of `ddp` first}"""
    reached = [r for r in choosing.by_rate(recipe, "times sooner than `ddp` ", page) if r["200mbit"]]
    found = {rate: [r for r in reached if r.get(rate, "-") != "-"] for rate in choosing.RATES}
    return {rate: [r["method"] for r in sorted(of, key=lambda row, rate=rate: -float(row[rate]))]
            for rate, of in found.items()}  # fmt: skip


def times(table: str) -> list[tuple[str, str, float]]:
    """(links, command, speed-up)"""
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    return [(row[0], row[2], float(row[3].split()[0])) for row in cells]


def test_what_a_row_names_is_ahead_of_the_strongest_of_the_other_side() -> None:
    """But for a row of `ddp`, which ours are ahead of by less than the gain that `plan` asks for."""
    found = times(choosing.links())
    assert all(sooner > 1 or ("strategy=ddp" in command and 1.1 * sooner > 1) for _, command, sooner in found)
    assert all("strategy=ddp" in command for links, command, _ in found if links == "1 Gb/s")


def test_what_plan_names_is_close_to_the_soonest_that_was_measured() -> None:
    """The page of `plan` has these numbers."""
    behind = []
    for one in known_losses():
        for rate in one.seconds:
            best, spent = choosing.planned(one, rate).best, choosing.to_loss(one, rate)
            assert best is not None
            behind.append(spent[best.candidate.title] / min(spent.values()))
    page = (ROOT / "docs" / "plan.md").read_text().replace("\n", " ")
    near = sum(times <= 1.14 for times in behind)
    assert f"In {near} of the {len(behind)} measured settings" in page
    assert f"within 14 % of the fastest measured method, and within {100 * max(behind) - 100:.0f} % in all" in page


def test_the_table_of_losses_is_that_of_the_results() -> None:
    assert known.PATH.read_text() == known.written()


def test_what_the_page_says_of_more_hosts() -> None:
    eight, sixteen = soonest("gpt", "8-hosts-"), soonest("gpt", "16-hosts-")
    assert [eight[rate][0] for rate in choosing.RATES if eight[rate]] == [OUTER] * 3
    assert [sixteen[rate][0] for rate in choosing.RATES if sixteen[rate]] == [choosing.GOSSIP, DDP, DDP]
    assert losses("gpt", "16-hosts-")[OUTER] > losses("gpt", "16-hosts-")["ddp"]
    assert not any("accumulating" in method for page in ("8-hosts-", "16-hosts-") for method in losses("gpt", page))


def test_where_a_worker_is_slow_now_and_then_more_delay_is_ahead() -> None:
    slow = {row["method"]: float(row["times faster than ddp"]) for row in rows("cluster-speed-2-cores")
            if row["straggler or model"] == "3"}  # fmt: skip
    assert max(slow, key=slow.__getitem__) == "gossip, delay 4"


def test_what_the_methods_cost_in_loss() -> None:
    """`ddp` with Muon ends lowest, then averages of gradients; gossip is behind, by more on more hosts."""
    for page in ("", "owners-"):
        found = losses("gpt", page)
        order = sorted(found, key=found.__getitem__)
        assert order[:2] == [DDP, "ddp, Muon"]
        assert all(name.startswith("compressed, int8") for name in order[2:4])
        assert found[choosing.GOSSIP] < found[OUTER]
    wide = losses("gpt-1024-tokens")
    assert wide[choosing.COMPRESSED] == wide[DDP] == min(wide.values())
    behind = [losses("gpt", page)[choosing.GOSSIP] - losses("gpt", page)["ddp, Muon"] for page in ("", "8-hosts-")]
    assert 0 < behind[0] < behind[1]


def test_what_the_page_says_of_outer_rounds_on_images() -> None:
    """Codes that owners add up end higher on images in four bits, and on text as before."""
    told, owned = losses("gpt"), losses("gpt", "owners-")
    assert all(abs(told[method] - owned[method]) < 0.01 for method in (OUTER, STREAMED))
    curves = choosing.result("losses-digits-owners-2-cores.json")["curves"]
    for recipe in ("vit", "resnet"):
        ends = [curves[f"{recipe} 4 {seed}"][OUTER]["scores"][-1] for seed in range(3)]
        assert mean(ends) > losses(recipe, "digits-")[OUTER]
    images = [command for _, command, _ in times(choosing.links()) if "recipe=gpt" not in command]
    assert len(images) == 2
    assert not any("outer" in command for command in images)


def test_how_far_behind_ddp_the_methods_of_the_page_why_end() -> None:
    found, page = losses("gpt", "owners-"), (ROOT / "docs" / "why.md").read_text()
    for start, method in (("[compressed", choosing.COMPRESSED), ("[gossip", choosing.GOSSIP), ("[outer", OUTER)):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {start}")]
        assert row.rstrip(" |").endswith(f" {found[method] - found['ddp, Muon']:.3f}")
    ours = ("gossip", "compressed", "outer", "streamed")
    assert all(loss > found["ddp, Muon"] for method, loss in found.items() if method.startswith(ours))
