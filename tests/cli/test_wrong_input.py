"""Wrong words for every option of every command, and in recipes: one line, code 1 or 2, before anything is measured.

Commands and options are those that the parser has; a wrong word is wrong for the option's type.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_decentral.cli import topology
from lightning_decentral.cli.console import number, refuse_unwritable, whole
from lightning_decentral.cli.main import added
from lightning_decentral.cli.network import parser as network_parser
from lightning_decentral.recipes import command as cli
from lightning_decentral.recipes import train
from lightning_decentral.shared.application import Application
from lightning_decentral.shared.errors import mendable, one_line, refuse_mistyped
from lightning_decentral.shared.plan.profile import Profile, write
from tests.conf.groups import CONF, FILES, nodes
from tests.settings import links, model

JOBS = "jobs: [{name: a, pieces: [1, 2]}, {name: b, pieces: [1]}]"
HOSTS = "source,target,latency_seconds,bytes_per_second\na,b,1e-4,1e9\nb,a,1e-4,1e9\n"
RIGHT = {
    "cuts": ["recipe=vit"],
    "plan": ["p.json", "--workers", "4"],
    "topology": ["ring", "--workers", "4"],
    "profile": ["recipe=vit"],
    "placement": ["h.csv"],
    "schedule": ["j.yaml"],
}
WRONG: dict[Any, list[str]] = {
    whole: ["abc", "", "1.5"],
    number: ["abc", "nan"],
}
# Words out of their ranges, and texts that must be read.
OUTSIDE = {
    "--workers": ["0", "-1"], "--per-node": ["0", "-1"], "--slices": ["0", "-1"], "--threshold": ["-1"],
    "--message-bytes": ["0", "-1"], "--steps": ["1", "0", "-1"], "--devices": ["0", "-1"], "--first": ["0", "-1"],
    "--pieces": ["0", "-1"], "--bandwidth": ["abc", "", "-1", "0", "nan", "5"], "--latency": ["abc", "", "-1", "0"],
    "--inside-bandwidth": ["abc", ""], "--inside-latency": ["abc", "-1us"], "--memory-bytes": ["abc", "", "-1", "0"],
    "--also": ["abc", "", "strategy=abc"], "--topology": ["abc", ""], "--among": ["abc", "a,c"],
    "--policy": ["abc", "", "lrtf,abc"], "--layout": ["abc", ""],
}  # fmt: skip
NAMED_TWICE = [("topology", "--plot", "t.coffee"), ("topology", "--plot", "t"), ("schedule", "--plot", "t.coffee")]


def commands() -> dict[str, argparse.ArgumentParser]:
    asked = ("cuts", "plan", "topology", "profile", "placement", "schedule")
    return {name: parser for name, parser in added(argparse.ArgumentParser(), asked).items() if name in asked}


def wrong_words() -> Iterator[tuple[str, str, str]]:
    """(command, option, word)"""
    for name, parser in commands().items():
        for action in parser._actions:
            option = next((o for o in action.option_strings if o.startswith("--")), None)
            for word in [*WRONG.get(action.type, []), *OUTSIDE.get(option or "", [])]:
                if option:
                    yield name, option, word


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Profile(model(), links().costs), "p.json")
    Path("h.csv").write_text(HOSTS)
    Path("j.yaml").write_text(JOBS)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a command that ends with code 1 or 2; nothing else was printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr()
    line = said.err.strip() if ended.value.code == 2 else str(ended.value.code)
    assert said.out.strip() == ""
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("command", "option", "word"), list(wrong_words()))
def test_a_wrong_word_is_one_line(command: str, option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal([command, *RIGHT[command], f"{option}={word}"], capsys)
    assert word.split(",")[-1].split("=")[-1] in line, line


@pytest.mark.parametrize(("command", "option"), [
    (name, f"--{word}")
    for name, parser in commands().items()
    for word in parser.get_default("outputs") or ()
])  # fmt: skip
@pytest.mark.parametrize("path", ["no/where.png", ".", "j.yaml/x.png", "/proc/x.png"])
def test_what_cannot_be_written_is_refused_before_it_is_measured(
    command: str, option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The input isn't there either: nothing has read it.
    line = refusal([command, "absent", *RIGHT[command][1:], option, path], capsys)
    assert f"{option} {path} can't be" in line


@pytest.mark.parametrize(("command", "option", "path"), NAMED_TWICE)
def test_a_picture_in_no_known_format(command: str, option: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ", png, " in refusal([command, *RIGHT[command], option, path], capsys)
    assert not Path(path).exists()


def test_looking_whether_a_file_can_be_written_leaves_it(tmp_path: Path) -> None:
    Path("there.json").write_text("kept")
    refuse_unwritable(
        argparse.Namespace(out="there.json", report=tmp_path / "new", hosts=None), ["out", "report", "hosts"]
    )
    assert Path("there.json").read_text() == "kept"
    assert not (tmp_path / "new").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("words", [
    "", "coffee", "topology", "topology ring", "topology rng --workers 4", "topology ring --workers 1000000",
    "topology base_graph max_degree=abc --workers 4", "topology base_graph max_degree= --workers 4",
    "topology base_graph max_degree=1.5 --workers 4", "topology base_graph coffee=3 --workers 4",
    "topology base_graph max_degree=0 --workers 4", "topology ring --workers 4 --coffee", "plan", "plan p.json",
    "plan none.json --workers 4", "plan j.yaml --workers 4", "plan p.json --workers 4 --coffee", "placement",
    "placement none.csv", "placement j.yaml", "placement p.json",
    "placement h.csv --topology base_graph strategy.topology.max_degree=abc", "schedule none.yaml",
    "schedule h.csv", "schedule", "schedule --trace none.csv",
    "cuts recipe=abc", "cuts strategy.cuts=1.5", "cuts optimizer.lr=fast",
    "cuts coffee", "profile recipe=abc", "profile trainer.max_epochs=1.5",
])  # fmt: skip
def test_other_mistakes_are_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(words.split(), capsys)


def test_what_takes_long_says_so_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def begun(*_: object) -> None:
        raise ValueError(f"begun after {capsys.readouterr().err!r}")

    monkeypatch.setattr(topology, "topology_of", begun)
    with pytest.raises(SystemExit, match="begun after 'matrices of 300 x 300: this may take minutes"):
        cli.main(["topology", "ring", "--workers", "300"])


@pytest.mark.parametrize("words", ["--sizes abc", "--repeats 1.5", "--timeout-seconds nan", "--coffee"])
def test_the_meter_of_the_network(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        network_parser().parse_args(words.split())
    assert capsys.readouterr().err.count("\n") == 1


# ---- recipes --------------------------------------------------------------------------------------------------------

RECIPES: Application = cli.RECIPES


@cache
def composed(groups: tuple[str, ...]) -> Any:
    return RECIPES.compose(groups)


@pytest.mark.parametrize(("words", "parts"), [
    ("optimizer.lr=fast", "optimizer.lr must be a number 'fast'"),
    ("optimizer.lr=", "optimizer.lr must be a number ''"),
    ("optimizer.betas=3", "optimizer.betas must be a pair 3"),
    ("optimizer=sgd optimizer.nesterov=abc", "optimizer.nesterov must be True or False 'abc'"),
    ("trainer.max_epochs=abc", "trainer.max_epochs must be a whole number 'abc'"),
    ("trainer.max_epochs=1.5", "trainer.max_epochs must be a whole number 1.5"),
    ("trainer.devices=1.5", "trainer.devices 1.5"),
    ("trainer.precision=abc", "trainer.precision 'abc' use one of 64"),
    ("data.batch_size=abc", "data.batch_size must be a whole number 'abc'"),
    ("data.num_workers=0.5", "data.num_workers must be a whole number 0.5"),
    ("scheduler.warmup=abc", "scheduler.warmup must be a number 'abc'"),
    ("strategy=gossip strategy.delay=abc", "strategy.delay must be a whole number 'abc'"),
    ("strategy=gossip strategy.timeout=30", "strategy.timeout timedelta(seconds=30)"),
    ("strategy=gossip strategy.start_method=frk", "strategy.start_method 'frk' use one of popen"),
    ("strategy=gossip strategy/topology=every strategy.topology.steps=1.5", "strategy.topology.steps 1.5"),
    ("strategy=token_pipeline strategy.slicing.granularity=abc", "strategy.slicing.granularity 'abc'"),
    ("callbacks.worker_loss_monitor.every_n_steps=abc", "callbacks.worker_loss_monitor.every_n_steps 'abc'"),
])  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused_before_anything_is_made(words: str, parts: str) -> None:
    *groups, (key, value) = (word.split("=") for word in words.split())
    cfg = composed(tuple(f"{group}={choice}" for group, choice in groups)).copy()
    OmegaConf.update(cfg, key, yaml.safe_load(value) if value else "", force_add=True)
    with pytest.raises(ValueError, match="must be") as raised:
        refuse_mistyped(cfg)
    place, *rest = parts.split(" ")
    assert str(raised.value).startswith(place)
    assert " ".join(rest[:-1]) in str(raised.value).replace(", got", "") or rest[-1] in str(raised.value)


@pytest.mark.sampled
@pytest.mark.parametrize(("words", "line"), [
    ("trainer.devices=0", "trainer.devices must be at least 1, got 0: trainer.devices=1, or =auto for all"),
    ("trainer.devices=-3", "trainer.devices must be at least 1, got -3"),
    ("trainer.devices=abc", "trainer.devices must be a number or numbers, got 'abc': trainer.devices=2, or =auto"),
    ("seed=abc", "seed must be a whole number from 0 up to 2.*, got 'abc': seed=0"),
    ("seed=", "seed must be a whole number from 0 up to 2.*, got '': seed=0"),
    ("seed=-1", "seed must be a whole number from 0 up to 2.*, got -1: seed=0"),
])  # fmt: skip
def test_what_lightning_would_refuse_late(words: str, line: str) -> None:
    cfg = RECIPES.compose(["recipe=vit", *words.split()])
    with pytest.raises(ValueError, match=line):
        train.refuse_mistaken(cfg)


OWNERS = {"slicing": "token_pipeline", "partition": "token_pipeline", "depth": "partial_backprop", "topology": "gossip"}


def left_out(tree: Any, place: str) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from left_out(value, f"{place}.{key}")
    elif tree == "???":
        yield place


def mandatory() -> Iterator[tuple[str, set[str]]]:
    """(words that choose a file with values that must be given, the keys of these)"""
    for file in FILES:
        group = file.parent.relative_to(CONF).as_posix()
        if keys := set(left_out(yaml.safe_load(file.read_text()), group.replace("/", "."))):
            owner = OWNERS.get(file.parent.name)
            yield f"strategy={owner} {group}={file.stem}" if owner else f"{group}={file.stem}", keys


@pytest.mark.parametrize(("words", "keys"), list(mandatory()))
def test_a_missing_value_is_named_by_the_word_that_gives_it(words: str, keys: set[str]) -> None:
    with pytest.raises(ValueError, match="must be given: add ") as raised:
        train.refuse_mistaken(RECIPES.compose(words.split()))
    given = re.findall(r"(\S+)=\.\.\.", str(raised.value))
    assert set(given) == keys
    train.refuse_mistaken(RECIPES.compose([*words.split(), *(f"{key}=null" for key in given)]))


@pytest.mark.parametrize(("words", "line"), [
    ("recipe=vit data.batch_size=0", "batch_size must be at least 1, got 0: give data.batch_size=1 or more"),
    ("recipe=vit data.num_workers=-1", "num_workers must be at least 0, got -1"),
])  # fmt: skip
def test_sizes_of_the_data(words: str, line: str) -> None:
    with pytest.raises(Exception, match=line) as raised:
        instantiate(RECIPES.compose(words.split()).data)
    assert mendable(raised.value)
    assert "\n" not in one_line(raised.value)


def test_a_wrong_option_of_a_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "recipe=vit", "trainer=cpu", "model.config.hidden_size=abc"])
    with pytest.raises(SystemExit, match=r"^error: ViTConfig refuses its options: [^\n]*'abc'[^\n]*$"):
        train.main()


def test_the_files_have_the_types_of_their_targets() -> None:
    for file in FILES:
        cfg: Any = OmegaConf.load(file)
        for _, node in nodes(OmegaConf.to_container(cfg, resolve=False)):
            refuse_mistyped(OmegaConf.create({key: value for key, value in node.items() if key != "defaults"}))
