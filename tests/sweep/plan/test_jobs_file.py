"""Jobs from files: written pieces, profiles cut into shards, public traces; mistakes in them, in one line each."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_decentral.shared.plan.profile import BlockCost, Model, Profile, write
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece
from lightning_decentral.sweep.plan.jobs_file import Training, read_jobs, split, step_pieces
from lightning_decentral.sweep.plan.traces import Layout, Submitted, gavel, queues, read_trace, tables, tiresias
from tests.docs.pages import ROOT, blocks

BLOCKS = tuple(BlockCost(f"b{i}", 1.0 + i, 2.0, 0.5, parameter_bytes=100) for i in range(4))
MODEL = Model("four", "cpu", BLOCKS)

TIRESIAS = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,vgg19,164,30
1,8,30,133,vgg11,147,23
2,2,53,3,inception4,127,26
"""
LINE = ["ResNet-18 (batch size 32)", "python3 main.py", "--num_steps", "1", "3948", "2", "1", "-1.000000", "12.500000"]
OTHER = ["LM (batch size 10)", "python main.py", "workloads/lm", "--steps", "1", "8601", "1", "1", "-1.000000", "0"]
GAVEL = "\t".join(LINE) + "\n" + "\t".join(OTHER) + "\n"


def test_written_and_measured_jobs(tmp_path: Path) -> None:
    write(Profile(MODEL), tmp_path / "four.json")
    (tmp_path / "jobs.yaml").write_text("""
jobs:
  - {name: small, pieces: [0.5, {compute_seconds: 1, load_seconds: 2e-1}], repeat: 2, memory_bytes: 1e9}
  - {name: model, profile: four.json, steps: 3, shards: 2, load_bytes_per_second: 400.0, arrival_seconds: 1.5}
""")
    small, model = read_jobs(tmp_path / "jobs.yaml").queues
    assert small.pieces == (WorkPiece(0.5), WorkPiece(1.0, 0.2)) * 2
    assert (small.memory_bytes, small.arrival_seconds) == (1e9, 0)
    assert model.pieces == (WorkPiece(3, 0.5), WorkPiece(7, 0.5), WorkPiece(12, 0.5), WorkPiece(8, 0.5)) * 3
    assert model.arrival_seconds == 1.5


def test_trainings_have_words_and_steps(tmp_path: Path) -> None:
    write(Profile(MODEL), tmp_path / "four.json")
    (tmp_path / "jobs.yaml").write_text("""
jobs:
  - {name: a, overrides: [lr=1, trainer.max_steps=3, +trainer.max_steps=4], arrival_seconds: 1.5}
  - {name: b, pieces: [1]}
  - {name: c, overrides: [trainer.max_steps=2], profile: four.json}
""")
    found = read_jobs(tmp_path / "jobs.yaml")
    assert [queue.name for queue in found.queues] == ["b"]
    words = ("lr=1", "trainer.max_steps=3", "+trainer.max_steps=4")
    assert found.trainings == (
        Training("a", words, 4, None, 1.5),
        Training("c", ("trainer.max_steps=2",), 2, MODEL.seconds),
    )
    assert found.trainings[0].queue([0.5, 0.25]) == Queue("a", (WorkPiece(0.5), WorkPiece(0.25)), 1.5)


def test_the_page_shows_a_file_that_is_read(tmp_path: Path) -> None:
    text, *_ = blocks(ROOT / "docs" / "scheduling.md", "yaml")
    (tmp_path / "jobs.yaml").write_text(text)
    write(Profile(MODEL), tmp_path / "vit.json")
    small, vit = read_jobs(tmp_path / "jobs.yaml").queues
    assert [len(small.pieces), len(vit.pieces)] == [15, 400]


def test_a_step_in_one_piece_is_the_profiles_step() -> None:
    assert step_pieces(MODEL) == [WorkPiece(MODEL.seconds)]
    assert step_pieces(MODEL, load_bytes_per_second=100.0) == [WorkPiece(MODEL.seconds, 4.0)]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (100, 1, 1, 1, 1), (1, 1, 1, 1, 100), (0, 0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_shards_are_consecutive_and_recompute_the_forward(sizes: tuple[int, ...], shards: int) -> None:
    blocks = tuple(BlockCost(str(i), 1.0, 2.0, 0.5, parameter_bytes=n) for i, n in enumerate(sizes))
    groups = split(blocks, shards)
    assert len(groups) == shards
    assert all(groups)
    assert tuple(block for group in groups for block in group) == blocks
    model = Model("m", "cpu", blocks)
    again = sum(block.forward_seconds for block in blocks) if shards > 1 else 0
    assert sum(piece.compute_seconds for piece in step_pieces(model, shards)) == model.seconds + again


def test_equal_blocks_are_cut_evenly() -> None:
    assert [len(group) for group in split(BLOCKS, 2)] == [2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: []", "must have a list of one or more `jobs`"),
        ("[1]", "must have a list of one or more `jobs`"),
        ("jobs: [", "isn't a YAML file of jobs"),
        ("jobs: [{pieces: [1]}]", "job 1: each job needs a name"),
        ("jobs: [{name: a}]", "job 1: give either pieces, a profile, or overrides of a training"),
        ("jobs: [{name: a, pieces: [1]}, {name: a, pieces: [2]}]", "two jobs are called 'a'"),
        (
            "jobs: [{name: a, overrides: [lr=1], steps: 3}]",
            "job 1: unknown key 'steps', known are name, overrides",
        ),
        ("jobs: [{name: a, overrides: lr=1}]", "overrides must be a list of texts such as optimizer.lr=1e-3, got 'lr"),
        (
            "jobs: [{name: a, overrides: [lr=1]}]",
            "the number of steps is missing: add an override such as trainer.max_steps",
        ),
        ("jobs: [{name: a, overrides: [trainer.max_steps=-1]}]", "job 1: the number of steps is missing, got -1"),
        ("jobs: [{name: a/b, overrides: [trainer.max_steps=1]}]", "the name 'a/b' also names a folder"),
        ("jobs: [{name: a, pieces: [1], stepps: 3}]", "job 1: unknown key 'stepps', known are name, pieces"),
        ("jobs: [{name: a, pieces: [1, two]}]", "job 1, piece 2: compute_seconds must be a number, got 'two'"),
        ("jobs: [{name: a, pieces: [-1]}]", "compute_seconds of a piece must be 0 or more, got -1"),
        ("jobs: [{name: a, pieces: 3}]", "pieces must be a list, got 3"),
        ("jobs: [{name: a, pieces: [1], repeat: 0}]", "repeat must be a whole number of 1 or more, got 0"),
        ("jobs: [{name: a, pieces: []}]", "job a has no pieces"),
        ("jobs: [{name: a, profile: none.json}]", "none.json can't be read"),
        ("jobs: [{name: a, profile: four.json, shards: 5}]", "5 shards need as many blocks, the profile has 4"),
        ("jobs: [{name: a, profile: four.json, load_bytes_per_second: 0}]", "must be more than 0, got 0"),
    ],
)
def test_mistakes_in_a_file_of_jobs_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    write(Profile(MODEL), tmp_path / "four.json")
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        read_jobs(tmp_path / "jobs.yaml")
    assert message in str(error.value)


def jobs_in(text: str, layout: Layout, folder: Path) -> list[Submitted]:
    (folder / "trace.csv").write_text(text)
    return read_trace(folder / "trace.csv", layout)


def test_layouts(tmp_path: Path) -> None:
    assert jobs_in(TIRESIAS, tiresias, tmp_path)[1] == Submitted("1", "vgg11", 8, 30.0, 133)
    assert jobs_in(GAVEL, gavel, tmp_path) == [
        Submitted("1", "ResNet-18 (batch size 32)", 2, 12.5, 3948),
        Submitted("2", "LM (batch size 10)", 1, 0.0, 8601),
    ]


def test_a_trace_takes_its_seconds_from_profiles(tmp_path: Path) -> None:
    jobs = jobs_in(TIRESIAS, tiresias, tmp_path)
    profiles = {"": Profile(MODEL), "vgg19": Profile(MODEL, variation=(0.5, 1.5))}
    first, second, third = queues(jobs, profiles, pieces=5)
    assert [len(queue.pieces) for queue in (first, second, third)] == [5, 5, 3]
    assert sum(piece.compute_seconds for piece in second.pieces) == pytest.approx(8 * 133 * MODEL.seconds)
    assert (second.name, second.arrival_seconds) == ("1 vgg11", 30.0)
    assert sum(piece.compute_seconds for piece in first.pieces) == pytest.approx(606 * MODEL.seconds, rel=0.1)
    assert len({piece.compute_seconds / 121 for piece in first.pieces}) > 2
    assert queues(jobs, profiles, pieces=5) == [first, second, third]


def test_a_trace_gives_tables_of_evenly_divided_work(tmp_path: Path) -> None:
    jobs = jobs_in(TIRESIAS, tiresias, tmp_path)
    _, second, _ = tables(jobs, {"": Profile(MODEL)})
    whole = 8 * 133 * MODEL.seconds
    assert second.seconds == pytest.approx({1: whole, 2: whole / 2, 4: whole / 4, 8: whole / 8})
    three = tables([replace(jobs[1], devices=3)], {"": Profile(MODEL)})[0]
    assert list(three.seconds) == [1, 2, 3]


@pytest.mark.parametrize(
    ("layout", "text", "message"),
    [
        (tiresias, "job_id,num_gpu,submit_time\n", "line 1: the header has no model_name"),
        (tiresias, "", "line 1: the header has no job_id"),
        (tiresias, TIRESIAS.splitlines()[0], "no jobs"),
        (tiresias, TIRESIAS + "3,1,0,5,vgg\n", "line 5: 5 fields, the header has 7"),
        (tiresias, TIRESIAS.replace("133", "many"), "line 3: iterations must be a whole number of 1 or more, got 'm"),
        (tiresias, TIRESIAS.replace("0,1,0,", "0,0,0,"), "line 2: devices must be a whole number of 1 or more"),
        (tiresias, TIRESIAS.replace(",53,", ",later,"), "line 4: arrival must be 0 or more seconds, got 'later'"),
        (tiresias, TIRESIAS.replace(",53,", ",nan,"), "line 4: arrival"),
        (gavel, GAVEL + "a b c\n", "line 3: 1 fields between tabs, but 9 or 10 are needed"),
        (gavel, GAVEL.replace("3948", "3.5"), "line 1: iterations must be a whole number"),
    ],
)
def test_malformed_rows_name_their_line(tmp_path: Path, layout: Layout, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        jobs_in(text, layout, tmp_path)
    assert message in str(error.value)
    assert str(tmp_path / "trace.csv") in str(error.value)


def test_other_mistakes_with_traces(tmp_path: Path) -> None:
    jobs = jobs_in(TIRESIAS, tiresias, tmp_path)
    with pytest.raises(ValueError, match="no profile for 'vgg19': give --profile 'vgg19=FILE'"):
        queues(jobs, {})
    with pytest.raises(ValueError, match="pieces must be at least 1, got 0"):
        queues(jobs, {"": Profile(MODEL)}, pieces=0)
    with pytest.raises(ValueError, match="can't be read"):
        read_trace(tmp_path / "none.csv", gavel)
