"""Every number in running text is read from a committed result, was set, or is said to have been measured once."""

import pytest

from tests.docs.numbers import FROM_RESULTS, text, unexplained
from tests.docs.pages import PAGES, name

SETTINGS = {
    "CONTRIBUTING.md": ["about 0.1 s"],
    "docs/causal-models.md": ["`transformers` 5.23.0"],
    "docs/choosing.md": ["16.8 MB of parameters, a simulated accelerator of 0.3 s", "is 3 times slower"],
    "docs/cluster.md": ["1.046 times its bytes", "take 1.007"],  # 1 + 66 / 1448, 1 + 66 / 8934
    "docs/codecs.md": ["at 10% and 1%", "about 0.4 arrives"],
    "docs/from-ddp.md": ["Lightning 2.6.5's tests"],
    "docs/measured.md": [  # the bounds are asserted in test_measured.py
        "a model of 16.8 MB, an accelerator simulated by 0.3 s",
        "within 7 % of the measured seconds",
        "more than 5 % are in the right order",
        "7 to 12 % below it",
        "To 95 % of the bound",
        "a step is 0.03 s of sleep",
    ],
    "docs/optimizers.md": [
        "The factor 0.2 sqrt(max side)",
        "and a momentum of 0.95",
        "momentum 0.95, rates from 3e-3 to 2e-2",
        "rate 0.7, momentum 0.5",
        "With K 5, 0.8 and 0.75",
        "rate 3e-2 and momentum 0.9",
        "(0.9, 0.999) become (0.656, 0.996). Left at 0.9",  # betas to the fourth power
    ],
    "docs/partial-backprop.md": [
        "over 70% of them lie in the last",  # tests/partial/compute/test_cut.py
        "keeps 47% of the saved activations and sends 95% of the gradients",  # printed by the command in front of it
    ],
    "docs/plan.md": [
        "within 2 % of it",
        "costs `ddp` 2.4 times",  # these nine: tests/gossip/plan/test_forecast.py
        "pays 1.29, 1.16, 1.09, 1.04 with delay",
        "1.24, 1.15, 1.08, 1.04 (",
        "within 17 % on the A40 and A100",  # of published runs, in the table above it
        "learning rates times 0.5, 1 and 2",
        "widened by 7 %",
        "no other method is 10 % sooner",
        "All are within 3 % of",  # tests/docs/test_committed_tables.py
    ],
    "docs/rules.md": ["Muon at 1.2e-2", "0.1 is the first tenth", "Muon's momentum for none of them (0.95)"],
    "docs/scheduling.md": ["of some 35 ms, two of them 1.5 s late", "the makespan is within 10 %", "6/5 = 1.2"],
    "docs/spilled.md": ["takes 0.9 of the memory"],
    "docs/trust.md": ["Over 1 % in a parameter"],
}
"""What was set, counted from a formula, computed by a test, or is another's."""

UNKEPT = {
    "docs/optimizers.md": [
        "0.978 and 0.989 are right (AdamW 0.986 and 0.992), under gossip 0.975 and 0.992 (0.972 and 0.989)",
        "1.630 for 1.586 under `ddp`, 1.676 for 1.637 under gossip",
        "it was 1.962 under",
        "1.378 to 1.351 under",
        "it is 1.618 for 1.640",
        "1.427 for 1.459",
    ],
    "docs/rules.md": ["with Muon has 1.586, gossip with `Int8` at 2e-2 1.637"],
}
"""Measured once; the raw results weren't kept, which the page says."""

READ = [name(page) for page in PAGES]


@pytest.mark.parametrize("page", FROM_RESULTS)
def test_phrases_of_the_results_stand_on_the_page(page: str) -> None:
    missing = [phrase for phrase in FROM_RESULTS[page]() if phrase not in text(page)]
    assert not missing


@pytest.mark.parametrize("page", READ)
def test_every_number_has_a_source(page: str) -> None:
    others = [*SETTINGS.get(page, []), *UNKEPT.get(page, [])]
    assert not [phrase for phrase in others if phrase not in text(page)], "a phrase that the page no longer has"
    measured = [*FROM_RESULTS[page]()] if page in FROM_RESULTS else []
    assert unexplained(page, [*measured, *others]) == []


@pytest.mark.parametrize("page", UNKEPT)
def test_a_page_says_what_was_not_kept(page: str) -> None:
    assert "weren't kept" in text(page)


def test_a_number_without_a_source_is_found() -> None:
    assert unexplained("docs/sweeps.md", []) != []
    assert any("0.42" in found for found in unexplained("docs/sweeps.md", []))
