"""Every door that names a method answers from the one table of known losses, and no two doors answer differently.

Doors: `lightning-decentral plan`, the page *What to take*, the hint when a training starts, the candidates of a
rehearsal, and error texts.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from torch import nn
from torch.optim import AdamW

from lightning_decentral.planner.compare import BASES, Comparison, plan
from lightning_decentral.planner.forecasts import composed
from lightning_decentral.planner.rehearsal.methods import METHODS, MOST, methods_of
from lightning_decentral.planner.show import verdict
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
    """But for `ddp` with the optimizer that is asked for, which is the row `ddp` then."""
    found = of(known, rate)
    assert found.best is not None
    for optimizer in ("muon", "accum_adamw", "adam"):
        other = plan(found.setting, found.variation, optimizer=optimizer)
        assert other.known == found.known == known
        assert other.best is not None
        title = other.best.candidate.title
        own = BASES[optimizer] if title == BASELINE else title
        assert own == found.best.candidate.title


@settings
def test_a_plan_names_nothing_by_losses_of_an_optimizer_that_none_were_measured_with(
    known: KnownLosses, rate: str
) -> None:
    found = of(known, rate)
    with pytest.raises(ValueError, match="doesn't show what sgd costs: profile again with optimizer=sgd"):
        plan(found.setting, found.variation, optimizer="sgd")
    sgd = plan(replace(found.setting, model=replace(found.setting.model, optimizer="sgd")), found.variation)
    assert sgd.known is None
    assert sgd.best is not None
    assert all(row.share is None for row in sgd.rows)
    said = list(verdict(sgd))
    assert sgd.stay or any("no loss was measured with sgd, so this ranks steps" in one for one in said)


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


ADVISED = r"\b(?:Muon|AccumAdamW?|AdamW?|SGD|Int8|Int4|BFloat16|QuasiGlobal\w*|GradientTracking)\b"


def reaching(name: str) -> bool:
    """Return whether gossip with this optimizer or codec is known to reach `ddp`'s loss on every kind of model."""
    of_kind: dict[str, bool] = {}
    for known in known_losses():
        words = (title for title in known.overrides if known.share(title) and not title.startswith("ddp"))
        found = any(re.search(rf"\b{name}\b", title, re.I) for title in words)
        of_kind[known.kind] = of_kind.get(known.kind, False) or found
    return all(of_kind.values())


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
        for rest in re.findall(r"\b(?:take|use|give) (.*)", text):
            advised = re.findall(ADVISED, rest)
            assert not advised or reaching(advised[0]), text
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
