"""Every door that names a method answers from the one table of known losses, and no two doors answer differently.

Doors: `lightning-decentral plan`, the page *What to take*, the hint when a training starts, the candidates of a
rehearsal, and error texts.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from math import inf

import pytest
from torch import nn
from torch.optim import AdamW

from lightning_decentral.planner.compare import BASES, Comparison, plan
from lightning_decentral.planner.forecasts import composed
from lightning_decentral.planner.rehearsal.methods import METHODS, MOST, methods_of
from lightning_decentral.shared.introduction import ACCUM, MUON, adam_hint
from lightning_decentral.shared.plan.forecast import Setting
from lightning_decentral.shared.plan.known_losses import BASELINE, KnownLosses, known_losses
from pages import choosing
from tests.docs.pages import ROOT

GRID = [(known, rate) for known in known_losses() for rate in known.seconds]
PAGE = (ROOT / "docs" / "choosing.md").read_text()
settings = pytest.mark.parametrize(("known", "rate"), GRID, ids=lambda value: str(value))


@cache
def planned(place: int) -> Comparison:
    return choosing.planned(*GRID[place])


def of(known: KnownLosses, rate: str) -> Comparison:
    return planned(GRID.index((known, rate)))


@settings
def test_plan_and_the_page_name_one_method(known: KnownLosses, rate: str) -> None:
    found = of(known, rate)
    assert found.best is not None
    assert known.share(found.best.candidate.title) is not None
    shown = known.workers == 4 and (known.recipe in choosing.EVERY_RATE or rate == "200000000")
    if shown:
        words = " ".join([*found.setting.model.words, *found.best.candidate.overrides.split()])
        assert choosing.trained(f"{words} trainer.devices=4") in PAGE


@settings
def test_a_plan_names_one_method_whatever_optimizer_the_user_has(known: KnownLosses, rate: str) -> None:
    """But for `ddp` with the optimizer that the profile has then, which is the row `ddp`, and for an optimizer whose
    cost that profile doesn't show, which is listed."""
    found = of(known, rate)
    muon = plan(found.setting, found.variation, optimizer="muon")
    assert muon.known == found.known == known
    assert found.best is not None
    assert muon.best is not None
    own = {"ddp": BASES["muon"]}
    title = muon.best.candidate.title
    assert own.get(title, title) == found.best.candidate.title or found.best.candidate.title in muon.refused


@settings
def test_a_rehearsal_tries_what_plan_names(known: KnownLosses, rate: str) -> None:
    found = of(known, rate)
    titles = [one.title for one in methods_of(known, found)]
    by_batches = [one.title for one in methods_of(known)]
    assert titles[0] == by_batches[0] == BASELINE
    assert max(len(titles), len(by_batches)) <= MOST
    assert all(known.share(title) is not None for title in (*titles, *by_batches))
    assert found.best is not None
    best = found.best.candidate
    # A rehearsal has neither hooks of ddp nor accumulated gradients.
    rehearsable = "fp16 hook" not in best.title
    assert titles[1] == best.title or not rehearsable
    assert rehearsable or "ddp, Muon" in titles


def test_of_an_unknown_model_a_rehearsal_tries_strategies_with_its_own_optimizer() -> None:
    assert methods_of(None) == METHODS
    assert not any(composed(one.overrides).optimizer for one in METHODS)


@pytest.mark.parametrize("known", known_losses(), ids=str)
def test_the_hint_names_first_what_is_the_sooner_in_the_table(known: KnownLosses) -> None:
    muon, accum = known.share(MUON), known.share(ACCUM)
    assert muon is not None
    assert muon <= (accum or inf)
    hint = adam_hint([AdamW(nn.Linear(2, 2).parameters())], known.workers)
    assert hint.index("`Muon(") < (hint.find("`AccumAdamW(") % len(hint))


def errors() -> Iterator[str]:
    """Texts of exceptions, and of what refuses."""
    for path in (ROOT / "lightning_decentral").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                yield "".join(part.value for part in ast.walk(node)
                              if isinstance(part, ast.Constant) and isinstance(part.value, str))  # fmt: skip


def test_error_texts_recommend_no_optimizer_that_the_table_has_not_above_the_others() -> None:
    """Muon where one is named for its losses; strategies that they name exist."""
    texts = list(errors())
    assert len(texts) > 300
    for text in texts:
        assert not re.search(r"(take|use) (AccumAdamW|QuasiGlobal)", text), text
        for words in re.findall(r"strategy=(?:ddp_fp16|ddp|gossip|compressed)\b(?: strategy/\w+=[a-z_]+)*", text):
            assert composed(words).strategy is not None
        for name in re.findall(r"experiment=(\w+)", text):
            assert any(f"experiment={name}" in one for known in known_losses() for one in known.overrides.values())


@pytest.mark.parametrize("workers", [32, 1024])
def test_far_from_what_was_measured_every_door_rehearses(workers: int) -> None:
    """The nearest setting is read by all, and its distance is named."""
    found = of(*GRID[0])
    far = plan(Setting(found.setting.model, found.setting.network, type(found.setting.cluster)(workers)))
    assert far.known is not None
    assert far.known.workers == 16
    assert far.known.is_far(workers, found.setting.model.parameter_bytes) == (workers > 32)
    assert methods_of(far.known, far)[1].title in {row.candidate.title for row in far.rows if row.to_loss < inf}
