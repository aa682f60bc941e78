"""A profile as a file: what is written is what is read; anything else is refused with the reason."""

import json
from pathlib import Path

import pytest

from lightning_decentral.hardware import Block, Cost, Model, Profile, read, write

PROFILE = Profile(
    Model("recipe=vit", "cpu", (Block("a", 0.1, 0.2, 0.01, 400, 10, 5), Block("b", 0.3, 0.6, 0.02, 800))),
    (Cost("exchange", "between", 2, 1, 1e-3, 25e6, 0.02, ((1e6, 0.041), (2e6, 0.081))),),
    (0.9, 1.1),
    {"host0": "AMD EPYC"},
)


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    write(PROFILE, tmp_path / "p.json")
    assert read(tmp_path / "p.json") == PROFILE


def test_sums() -> None:
    assert PROFILE.model.seconds == pytest.approx(1.23)
    assert PROFILE.model.parameter_bytes == 1200
    assert PROFILE.network[0].seconds(25e6) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "no JSON"),
        (lambda text: "[1, 2]", "not a profile of this package"),
        (lambda text: json.dumps({**json.loads(text), "format": "other"}), "not a profile of this package"),
        (lambda text: json.dumps({**json.loads(text), "version": 0}), "version 0, this package reads version 1"),
        (lambda text: text.replace('"forward_seconds"', '"forward"'), "is damaged"),
        (lambda text: json.dumps({**json.loads(text), "network": [{}]}), "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "p.json"
    write(PROFILE, path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lightning-decentral profile"):
        read(tmp_path / "absent.json")
