"""The benchmark for a CUDA device: silent without one; its parts run on the CPU as they would there."""

import json
from pathlib import Path

import pytest
import torch

from gpu import step
from gpu.report import page
from gpu.work import Work
from network.codec import CODECS

CPU = torch.device("cpu")
SMALL = {
    "gpt": Work(("recipe=gpt", "model.config.n_embd=8", "model.config.n_layer=1", "model.config.n_head=1"),
                    {"vocab_size": 16, "n_positions": 8}, 2),
    "resnet": Work(("recipe=resnet", "model.config.hidden_sizes=[4,4]", "model.config.depths=[1,1]"),
                       {"num_labels": 3, "image_size": 8, "num_channels": 1}, 2),
}  # fmt: skip


def test_without_a_device_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert step.main([], results=tmp_path) == 0
    assert capsys.readouterr().out == "no CUDA device here: nothing was measured\n"
    assert list(tmp_path.iterdir()) == []


def test_hidden_is_one_where_the_longer_one_covers_the_shorter() -> None:
    assert step.hidden(computing=3, exchange=2, both=3) == 1
    assert step.hidden(computing=2, exchange=3, both=5) == 0


@pytest.mark.thorough
@pytest.mark.threads  # the exchange of messages that are staged has a group in this process
def test_every_part_runs_and_is_reported(tmp_path: Path) -> None:
    result = step.measure(SMALL, turns=1, steps=2, elements=2**18, side=16, device=CPU)
    assert set(result["binding"]) == set(SMALL)
    for row in result["binding"].values():
        assert row["ratio"] == pytest.approx(row["seconds"]["gossip"][0] / row["seconds"]["plain"][0])
    rates = result["codecs"]["GB/s"]
    assert set(rates) == {*map(repr, CODECS), "copy"}
    assert all(rate > 0 for parts in rates.values() for rate in parts.values())
    staged = result["staging"]
    assert staged["message bytes"] == 4 * 2**18
    assert staged["copies"] == 0, "nobody counts on the CPU"
    text = page(json.loads(json.dumps(result)))
    assert "| gpt | " in text
    assert f"hidden {staged['hidden']:.2f}" in text


@pytest.mark.gpu
def test_a_message_in_flight_holds_no_more_than_what_is_heard() -> None:
    staged = step.staging(2**18, 2, 256, torch.device("cuda", 0))
    assert 0.9 < staged["copies"] < 1.2
