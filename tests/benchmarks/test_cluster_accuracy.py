"""Seconds to an accuracy: what is kept at the marks is the model that Lightning tests, and what is reported of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from network.accuracy import EXAMPLES, RECIPES, draw, mean_rows, names_of, page, reached, scores, seconds_at
from network.accuracy_worker import flat, train
from tests.tiny import in_processes

SMALL = [
    "recipe=resnet",
    "model.config.embedding_size=4",
    "model.config.hidden_sizes=[4,4]",
    "model.config.depths=[1,1]",
]
FALLING = {"steps": [10, 20, 30], "seconds": [1.0, 2.0, 3.0], "scores": [3.0, 2.0, 2.5]}
LATE = {"steps": [10, 20, 30], "seconds": [2.0, 4.0, 6.0], "scores": [3.0, 2.6, 2.0]}


def trained_and_tested(folder: Path) -> tuple[Tensor, float]:
    plan = {"folder": folder, "words": SMALL, "steps": 6, "every": 3, "seed": 0}
    trainer, model, data = train(plan, "0", ["strategy=gossip"], ["trainer.devices=2", "strategy.start_method=fork"])
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    return flat(model), tested["test/accuracy"]


@pytest.mark.thorough
def test_the_mean_of_what_the_workers_keep_is_what_lightning_tests(tmp_path: Path) -> None:
    end, tested = in_processes(trained_and_tested, tmp_path)
    first, second = (torch.load(tmp_path / f"0-{rank}.pt") for rank in range(2))
    assert not torch.equal(first[-1], second[-1]), "the workers were never apart"
    rows = mean_rows(tmp_path, "0", 2)
    torch.testing.assert_close(rows[-1], end)
    assert (rows[0] - end).norm() > 0.01, "the first mark is another one"
    assert scores(SMALL, 0, rows)[-1] == pytest.approx(tested)


def test_the_clock_runs_from_the_first_start_to_the_last_end() -> None:
    records = [{"begin": 5.0, "ends": [6.0, 8.0, 9.0]}, {"begin": 4.5, "ends": [7.0, 7.5, 9.5]}]
    assert seconds_at(records, [1, 3]) == [2.5, 5.0]


def test_a_target_counts_from_the_first_mark_that_reaches_it_and_only_if_all_seeds_do() -> None:
    gpt, resnet = RECIPES["gpt"], RECIPES["resnet"]
    assert reached(gpt, [FALLING], 2.0) == (2.0, 20)
    assert reached(gpt, [FALLING, LATE], 2.0) == (4.0, 25)
    assert reached(gpt, [FALLING, LATE], 1.9) is None
    assert reached(resnet, [LATE], 2.7) == (2.0, 10)


def test_a_page_says_seconds_steps_and_the_ratio_to_the_fastest_ddp(tmp_path: Path) -> None:
    last = RECIPES["gpt"].targets[-1]

    def run(seconds: float) -> dict[str, Any]:
        times = {"steps": [20, 40], "seconds": [seconds / 2, seconds], "scores": [9.0, last]}
        return times | {"seconds_per_step": seconds / 40, "bytes_sent": 25e6, "bytes": 50e6}

    methods = dict(zip(RECIPES["gpt"].methods, map(run, (40.0, 30.0, 20.0, 10.0)), strict=True))
    about = {"hosts": 4, "rate": "200mbit", "hardware": {"cores": "2"}}
    results = {**about, "runs": {"gpt 0": {"alone": 0.25, "methods": methods}}}
    text = page(results)
    assert "gpt: 50.00 MB of parameters; a step of a host by itself, all hosts at once, takes 0.250 s" in text
    assert "| ddp | 25.00 | 1.000 | 1.000 | 40.0 s (40) | 40.0 s (40) | 40.0 s (40) | 0.75 |" in text
    assert (
        "| gossip, int8, AccumAdamW | 25.00 | 1.000 | 0.250 | 10.0 s (40) | 10.0 s (40) | 10.0 s (40) | 3.00 |" in text
    )
    assert text.startswith("4 hosts of one processor thread each at 200mbit, namespaces on one machine: cores 2.\n")
    draw(results, names_of(results), tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 0


def test_all_test_images_of_digits_are_used() -> None:
    from lightning_decentral.recipes.digits import Digits

    data = Digits(batch_size=1)
    data.setup("test")
    assert len(data.splits["test"]) == EXAMPLES
