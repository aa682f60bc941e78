"""A profile as a file: what is written is what is read; anything else is refused with the reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model, Profile, RoundWork, read, write

BLOCKS = (BlockCost("a", 0.1, 0.2, 0.01, 400, 10, 5), BlockCost("b", 0.3, 0.6, 0.02, 800))
PROFILE = Profile(
    Model("recipe=vit", "cpu", BLOCKS, rounds=(RoundWork("Plain()", 1e-9, 2e-10),)),
    (LinkCost("exchange", "between", 2, 1, 1e-3, 25e6, 0.02, ((1e6, 0.041), (2e6, 0.081)), peers=2),),
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


def test_a_file_from_before_rounds_were_measured_has_none(tmp_path: Path) -> None:
    write(PROFILE, tmp_path / "p.json")
    found = json.loads((tmp_path / "p.json").read_text())
    del found["model"]["rounds"], found["network"][0]["peers"]
    (tmp_path / "p.json").write_text(json.dumps(found))
    old = read(tmp_path / "p.json")
    assert (old.model.rounds, old.network[0].peers) == ((), 1)


def test_a_round_without_neighbours_is_no_work() -> None:
    (work,) = PROFILE.model.rounds
    assert [work.seconds_per_byte(heard) for heard in (0, 1, 3)] == pytest.approx([0.0, 1.2e-9, 1.6e-9])
    talking = replace(work, round_seconds=1e-3, message_seconds=1e-4)
    assert [talking.seconds(1e6, heard) for heard in (0, 1, 3)] == pytest.approx([0.0, 2.3e-3, 2.9e-3])
    assert talking.times(2).seconds(1e6, 3) == pytest.approx(2 * talking.seconds(1e6, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "no JSON"),
        (lambda text: "[1, 2]", "not a profile of this package"),
        (lambda text: json.dumps({**json.loads(text), "format": "other"}), "not a profile of this package"),
        (lambda text: json.dumps({**json.loads(text), "version": 0}), "version 0, this package reads version 1"),
        (lambda text: text.replace('"forward_seconds"', '"forward"'), "is damaged"),
        (lambda text: json.dumps({**json.loads(text), "network": [{}]}), "is damaged"),
        (lambda text: text.replace('"own_seconds_per_byte"', '"own"'), "is damaged"),
        (
            lambda text: text.replace('"own_seconds_per_byte": 1', '"own_seconds_per_byte": -1'),
            "is damaged.*can't take -1",
        ),
        (lambda text: text.replace('"peers": 2', '"peers": 0'), "is damaged.*at least one neighbour, got 0"),
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
