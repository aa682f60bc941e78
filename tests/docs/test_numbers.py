"""Every number in running text is read from a committed result, or was set."""

import pytest

from tests.docs.numbers import FROM_RESULTS, text, unexplained
from tests.docs.pages import PAGES, name

SETTINGS = {
    "CONTRIBUTING.md": ["about 0.1 s"],
    "docs/causal-models.md": ["`transformers` 5.23.0"],
    "docs/cluster.md": ["1.046 times its bytes", "take 1.007"],  # 1 + 66 / 1448, 1 + 66 / 8934
    "docs/codecs.md": ["at 10% and 1%", "`Int2` transmits about 0.4"],
    "docs/elastic.md": ["others lost 0.1 s, and a new one took part"],  # tests/benchmarks/test_elastic_pipelines.py
    "docs/from-ddp.md": ["Lightning 2.6.5's tests"],
    "docs/measured.md": [  # the bounds are asserted in test_measured.py
        "a model of 16.8 MB, an accelerator simulated by 0.3 s",
        "within 7 % of the measured seconds",
        "more than 5 % are in the right order",
        "7 to 12 % below it",
        "a step is 0.03 s of sleep",
        "has 0.1 s of sleep for 256 tokens",
    ],
    "docs/optimizers.md": [
        "The factor 0.2 sqrt(max side)",
        "and a momentum of 0.95",
        "a momentum of 0.9 and `Int8`",
        "a momentum from 0.8 to 0.95 with the best constant one",
        "(0.9, 0.999) become (0.656, 0.996). Left at 0.9",  # betas to the fourth power
    ],
    "docs/outer-rounds.md": ["0.1 is the first tenth"],
    "docs/partial-backprop.md": [
        "keeps 47% of the saved activations and sends 95% of the gradients",  # printed by the command in front of it
    ],
    "docs/plan.md": [
        "of those within 10 % of it, the one that sends least",
        "`--threshold` percent over it (10 by default)",
        "on 4, 8 and 16",
        "In 23 of the 26 measured settings",  # these four: test_choosing.py
        "within 14 % of the fastest",
        "within 29 % in all",
        "costs `ddp` 2.4 times",  # these nine: tests/gossip/plan/test_forecast.py
        "takes 1.29, 1.16, 1.09, 1.04 with delay",
        "1.24, 1.15, 1.08, 1.04 (",
        "Of the 30 numbers that weren't given",  # these two: test_published.py
        "within 12 %, the furthest is 41 % off",
    ],
    "docs/ray.md": ["Tried with Ray 2.60"],  # constraints.txt
    "docs/rehearse.md": [
        "learning rates times 0.5, 1 and 2",
        "no other method is 10 % faster",
        "up to 1.5 times those rehearsed",
        "differ by more than 10 %",
        "Such steps take 10 to 30 ms",
        "a sleep of 0.1 s",
        "here for a target of 2.2",
    ],
    "docs/scheduling.md": ["of some 35 ms, two of them 1.5 s late"],
    "docs/spilled.md": ["takes 0.9 of the memory"],
    "docs/tutorial.md": ["A model of 0.94 MB"],
    "docs/trust.md": ["Over 1 % in a parameter", "workers and lobby speak TLS 1.3"],
    "docs/why.md": [
        "takes 2.4 times the mean computing time under `ddp`, 1.29 times",  # tests/gossip/plan/test_forecast.py
        "0.7, 2.0 and 3.9 % behind in loss",  # these seven are the papers'
        "At 2.4 billion it was -0.1, 0.3 and 1.1 %",
        "a Llama of 20.4 million parameters",
        "from 0.036 to 0.015 nats",
        "took 67.9 ms in place of 188.5",
        "122.2 in place of 167.3",
    ],
}
"""What was set, counted from a formula, computed by a test, or is another's."""

GENERATED = "docs/against-the-papers.md"  # from its first number on: tests/benchmarks/test_papers.py
READ = [name(page) for page in PAGES if name(page) != GENERATED]


@pytest.mark.parametrize("page", FROM_RESULTS)
def test_phrases_of_the_results_stand_on_the_page(page: str) -> None:
    missing = [phrase for phrase in FROM_RESULTS[page]() if phrase not in text(page)]
    assert not missing


@pytest.mark.parametrize("page", READ)
def test_every_number_has_a_source(page: str) -> None:
    others = SETTINGS.get(page, [])
    assert not [phrase for phrase in others if phrase not in text(page)], "a phrase that the page no longer has"
    measured = [*FROM_RESULTS[page]()] if page in FROM_RESULTS else []
    assert unexplained(page, [*measured, *others]) == []


def test_a_number_without_a_source_is_found() -> None:
    assert unexplained("docs/sweeps.md", []) != []
    assert any("0.42" in found for found in unexplained("docs/sweeps.md", []))
