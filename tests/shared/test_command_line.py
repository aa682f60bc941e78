"""LightningCLI: strategies by name, by class path with or without options, from YAML and back into it."""

import gc
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra.utils import get_object, instantiate
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_decentral
from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import DifferenceCompression, Every, Ring, TopK, Topology
from lightning_decentral.shared.plan.described import described
from lightning_decentral.shared.plan.kinds import _parts, class_path

STRATEGIES = [name for name in lightning_decentral.__all__ if name.endswith("Strategy")]
CONF = Path("conf/strategy")
OURS = "lightning_decentral."
READ = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(CONF.glob("*.yaml"))}
TARGETS = {node["_target_"].rpartition(".")[2]: node for node in READ.values() if "_target_" in node}
OF_THE_TRAINER = ("accelerator", "parallel_devices", "precision_plugin", "checkpoint_io", "cluster_environment")
PARTS = [file for file in sorted(CONF.glob("*/*.yaml")) if "???" not in file.read_text()]


def cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The strategy that `python script.py WORDS` makes."""
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False}
    options = {"save_config_callback": None, "seed_everything_default": False, "trainer_defaults": quiet}
    return LightningCLI(BoringModel, run=False, **options).trainer.strategy


def told(strategy: Any) -> dict[str, str]:
    """All that it was constructed with, but for what every Trainer gives to its strategy."""
    facts = described(strategy, "it")
    return {name: text for name, text in facts.items() if not name.removeprefix("it.").startswith(OF_THE_TRAINER)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_named_by_its_class_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = cli(monkeypatch, f"--trainer.strategy=lightning_decentral.{name}")
    assert told(made) == told(getattr(lightning_decentral, name)())


def test_options_are_dotted_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["delay=2", "topology=lightning_decentral.gossip.Ring", "start_method=fork"]
    strategy = "lightning_decentral.GossipStrategy"
    made = cli(monkeypatch, f"--trainer.strategy={strategy}", *(f"--trainer.strategy.{word}" for word in words))
    assert told(made) == told(GossipStrategy(delay=2, topology=Ring(), start_method="fork"))


@pytest.mark.parametrize("named", ["gossip", "lightning_decentral.GossipStrategy"])
def test_parts_are_named_as_in_python(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    parts = {"topology": "ring", "codec": "int8", "combine": "push_sum"}
    made = cli(monkeypatch, f"--trainer.strategy={named}", *(f"--trainer.strategy.{k}={v}" for k, v in parts.items()))
    assert told(made) == told(GossipStrategy(**parts))  # type: ignore[arg-type]
    words = ["topology=every", "topology.steps=4", "topology.inner=ring"]
    made = cli(monkeypatch, f"--trainer.strategy={named}", *(f"--trainer.strategy.{word}" for word in words))
    assert told(made) == told(GossipStrategy(topology=Every(4, Ring())))


def test_a_misspelt_name_is_answered_by_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli(monkeypatch, "--trainer.strategy=gossip", "--trainer.strategy.topology=rng")
    error = capsys.readouterr().err
    assert "'rng' is not a Topology: did you mean 'ring'? use one of " in error
    assert "alternating_exp" in error  # behind classes of other modules, where those are imported
    with pytest.raises(ValueError, match=r"did you mean 'gossip'. Example choices: compressed, gossip, .* ddp"):
        cli(monkeypatch, "--trainer.strategy=gossp")
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='horse'`"):  # Lightning's own
        cli(monkeypatch, "--trainer.strategy=horse")


@pytest.mark.parametrize(
    ("made", "registry", "misspelt"),
    [
        (Trainer, StrategyRegistry, {"gossp": "gossip", "spill": "spilled"}),
        (Fabric, STRATEGY_REGISTRY, {"gossp": "gossip", "spilld": "spilled", "token_pipelin": "token_pipeline"}),
    ],
)
def test_who_asks_a_registry_gets_its_names_and_who_chooses_gets_the_one_that_was_meant(
    made: Any, registry: Any, misspelt: dict[str, str]
) -> None:
    for name, meant in misspelt.items():
        assert name not in registry.available_strategies()
        with pytest.raises(ValueError, match=f"strategy='{name}' is not a strategy: did you mean '{meant}'"):
            made(strategy=name, accelerator="cpu")
    with pytest.raises(ValueError, match="selected an invalid accelerator name"):  # its own
        made(strategy="gossip", accelerator="horse")


def test_a_class_within_a_function_has_no_path() -> None:
    @dataclass(frozen=True)
    class Unreachable(Ring):
        pass

    with pytest.raises(ValueError, match="'unreachable' is not a Topology") as error:
        class_path(Topology, "unreachable")
    assert "unreachable," not in str(error.value)
    del Unreachable, error
    gc.collect()  # else other tests see the class


IMPORTS = ["from lightning.pytorch.cli import LightningCLI", "import lightning_decentral"]


@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["before", "after"])
def test_names_are_known_whichever_is_imported_first(imports: list[str]) -> None:
    """LightningCLI, and jsonargparse with it, or this package."""
    then = [
        "from lightning.pytorch.demos.boring_classes import BoringModel",
        "LightningCLI(BoringModel, run=False, save_config_callback=None)",
    ]
    words = ["--trainer.strategy=gossip", "--trainer.strategy.topology=rng"]
    command = [sys.executable, "-c", "\n".join([*imports, *then]), *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100).stderr
    assert "'rng' is not a Topology: did you mean 'ring'? use one of alternating_exp" in said


def test_a_printed_configuration_makes_the_same_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given, printed = tmp_path / "given.yaml", tmp_path / "printed.yaml"
    gossip = "lightning_decentral.gossip"
    parts = {
        "topology": path(f"{gossip}.Every", steps=3, inner=path(f"{gossip}.Ring")),
        "codec": path(f"{gossip}.DifferenceCompression", inner=path(f"{gossip}.TopK", fraction=0.2)),
    }
    strategy = path("lightning_decentral.GossipStrategy", delay=3, **parts)
    given.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        cli(monkeypatch, f"--config={given}", "--print_config")
    printed.write_text(out.getvalue())
    options = {"topology": Every(3, Ring()), "codec": DifferenceCompression(TopK(fraction=0.2))}
    assert told(cli(monkeypatch, f"--config={printed}")) == told(GossipStrategy(delay=3, **options))
    assert "find_unused_parameters" not in out.getvalue(), "options of a wrapper that isn't there"


def path(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, **({"init_args": init_args} if init_args else {})}


def as_path(node: Any) -> Any:
    """A node of Hydra's as jsonargparse has it."""
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    if node["_target_"] == "datetime.timedelta":
        return str(timedelta(**{k: v for k, v in node.items() if k != "_target_"}))  # 0:05:00
    return path(node["_target_"], **{k: as_path(v) for k, v in node.items() if k not in ("_target_", "defaults")})


def choices(strategy: str) -> list[dict[str, Any]]:
    """The strategy's configuration file, and that with every part that can stand in it, as jsonargparse has them."""
    node = TARGETS[strategy]
    groups = {group for entry in node.get("defaults", []) if isinstance(entry, dict) for group in entry}
    files = [file for file in PARTS if file.parent.name in groups]
    read = [(file.parent.name, yaml.safe_load(file.read_text())) for file in files]
    whole = [(group, part) for group, part in read if "defaults" not in part and stands_alone(part)]
    return [as_path(node), *(as_path({**node, group: part}) for group, part in whole)]


def stands_alone(part: dict[str, Any]) -> bool:
    """Whether no other codec must wrap it."""
    return getattr(instantiate(part), "complete", True)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_option_and_part_of_the_configuration_files_is_one_of_the_command_line(strategy: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    for choice in choices(strategy):
        parsed = parser.parse_object({"strategy": choice})
        saved = parser.dump(parsed, skip_none=False)  # as LightningCLI saves and prints it
        made, again = (parser.instantiate(read).strategy for read in (parsed, parser.parse_string(saved)))
        assert type(made).__name__ in (strategy, f"Elastic{strategy}")
        assert told(again) == told(made)
    with pytest.raises(Exception, match="dely"):
        parser.parse_object({"strategy": path(f"lightning_decentral.{strategy}", dely=1)})


@pytest.mark.parametrize("name", ["gossip", "compressed", "token_pipeline", "partial_backprop"])
def test_every_name_that_ddp_has_exists_and_means_the_same_processes(name: str) -> None:
    """`ddp_find_unused_parameters_true` and its like choose something of a wrapper, which isn't there."""
    wrapped = [known for known in StrategyRegistry.available_strategies() if known.split("_")[0] == "ddp"]
    assert len(wrapped) >= 12
    for known in wrapped:
        made = StrategyRegistry.get(name + known.removeprefix("ddp"))
        assert made._start_method == StrategyRegistry.get(known)._start_method


def named_parts() -> list[tuple[str, str, str]]:
    """(strategy, option, name) of every part that an option of a strategy takes by its name."""
    found = []
    for strategy in STRATEGIES:
        for option, hint in get_type_hints(getattr(lightning_decentral, strategy).__init__).items():
            kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
            # Without those of other tests, which may be loaded.
            names = {n for kind in kinds for n, part in _parts(kind).items() if part.__module__.startswith(OURS)}
            found += [(strategy, option, name) for name in sorted(names)]
    return found


SUITED = ("pseudo_gradient",)  # Hydra's file has its rate suited to the number of workers, Python the fixed 0.7


def outcome(make: Callable[[], Any]) -> Any:
    """What was constructed; None where it is refused. A list or a tuple, 0 or 0.0 are the same."""
    try:
        return {key: re.sub(r"\.0$", "", text).replace("[]", "()") for key, text in told(make()).items()}
    except (Exception, SystemExit):
        return None


def test_python_and_hydra_have_the_same_names() -> None:
    options = {(option, name) for _, option, name in named_parts() if option != "orthogonal"}  # the codecs' again
    assert len(options) > 60
    assert options == {(file.parent.name, file.stem) for file in CONF.glob("*/*.yaml")}


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "option", "name"), named_parts())
def test_a_part_by_its_name_is_the_same_in_python_on_the_command_line_and_in_hydra(
    strategy: str, option: str, name: str
) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    words = [f"--strategy=lightning_decentral.{strategy}", f"--strategy.{option}={name}"]
    by_cli = outcome(lambda: parser.instantiate(parser.parse_args(words)).strategy)
    by_name = outcome(lambda: getattr(lightning_decentral, strategy)(**{option: name}))
    assert by_cli == by_name
    node = yaml.safe_load((CONF / ("codec" if option == "orthogonal" else option) / f"{name}.yaml").read_text())
    if needed := required(get_object(node["_target_"])):
        with pytest.raises(ValueError, match=rf"write \w+\({needed[0]}=\.\.\."):
            getattr(lightning_decentral, strategy)(**{option: name})
    elif not {"defaults", "???"} & {*node, *map(str, node.values())} and name not in SUITED:
        path = f"lightning_decentral.{strategy}"
        assert outcome(lambda: instantiate({"_target_": path, option: node}, _convert_="all")) == by_name


def required(part: Any) -> list[str]:
    """Names of the arguments without a default."""
    return [p.name for p in inspect.signature(part).parameters.values() if p.default is p.empty]
