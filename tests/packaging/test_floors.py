"""The contract of the floors holds, each part of it breaks where it should; few modules name torch.distributed, one
CUDA."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.project import PYPROJECT, ROOT

PACKAGE = ROOT / "lightning_decentral"
MODULES = sorted(
    path for path in PACKAGE.rglob("*.py") if not {"conf", "recipes"} & set(path.relative_to(PACKAGE).parts)
)
CONTRACTS = PYPROJECT["tool"]["importlinter"]["contracts"]

# (the contract, where a line is added, the line): each is broken once for every way in which it can be.
BREACHES = [
    ("Methods don't know each other", "pipeline/wire/executor.py", "import lightning_decentral.gossip.plan.weights"),
    ("Methods don't know each other", "gossip/wire/mixer.py", "import lightning_decentral.elastic.plan.view"),
    ("Methods don't know each other", "shared/wire/mean.py", "import lightning_decentral.gossip.plan.weights"),
    ("Plans are values", "gossip/plan/weights.py", "import torch"),
    ("Plans are values", "sweep/plan/policy.py", "import lightning_decentral.sweep.wire.client"),
    ("Computing is tensor arithmetic", "gossip/compute/mixing.py", "import lightning_decentral.shared.wire.pending"),
    ("Only the top of a folder knows Lightning", "partial/wire/reducer.py", "import lightning"),
]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def linted(folder: Path) -> str:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100).stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    left_out = shutil.ignore_patterns("__pycache__", "conf", "recipes")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_four_contracts_are_kept(copy: Path) -> None:
    assert len(CONTRACTS) == 4
    assert "Contracts: 4 kept, 0 broken." in linted(copy)


def test_a_breach_is_seen(copy: Path) -> None:
    """Each by its own line, under its contract; all at once, as the graph of imports takes seconds to make."""
    places = [copy / PACKAGE.name / module for _, module, _ in BREACHES]
    before = [path.read_text() for path in places]
    for path, (_, _, line) in zip(places, BREACHES, strict=True):
        path.write_text(f"{path.read_text()}\n{line}\n")
    said = linted(copy)
    for path, text in zip(places, before, strict=True):
        path.write_text(text)
    _, *found = re.split(r"^(.+)\n-+$", said.partition("\nBroken contracts\n")[2], flags=re.MULTILINE)
    broken = dict(zip(found[::2], (" ".join(text.split()) for text in found[1::2]), strict=True))
    for contract, module, line in BREACHES:
        (seen,) = (text for name, text in broken.items() if name.startswith(contract))
        assert f"{dotted(PACKAGE / module)} -> {line.removeprefix('import ')} (l." in seen, said


def test_a_folder_beside_the_ten_is_seen(copy: Path) -> None:
    stray = copy / PACKAGE.name / "stray"
    stray.mkdir()
    (stray / "__init__.py").touch()
    said = linted(copy)
    shutil.rmtree(stray)
    assert "stray" in said
    assert "4 kept" not in said


def names(source: str, module: str) -> list[int]:
    """Lines that import this module or reach it as an attribute of its parent."""
    lines: list[int] = []
    if module.rpartition(".")[2] not in source:  # most modules, in no time
        return lines
    for node in ast.walk(ast.parse(source)):
        named = {
            ast.Import: lambda n: [alias.name for alias in n.names],
            ast.ImportFrom: lambda n: [f"{n.module}.{alias.name}" for alias in n.names],
            ast.Attribute: lambda n: [ast.unparse(n)],
        }.get(type(node), lambda n: [])(node)
        if any(f"{name}.".startswith(f"{module}.") for name in named):
            lines.append(node.lineno)
    return lines


# The transport moves messages; FSDP2 moves its own; a rehearsal answers in the place of torch.distributed.
TALKING = tuple(PACKAGE / "shared" / "wire" / f"{name}.py" for name in ("transport", "fsdp", "in_process_group"))


def test_only_three_modules_name_torch_distributed() -> None:
    rest = [path for path in MODULES if path not in TALKING]
    assert [dotted(path) for path in rest if names(path.read_text(), "torch.distributed")] == []


def test_the_transport_is_seen_to_name_it() -> None:
    assert names(TALKING[0].read_text(), "torch.distributed")
    assert names("from torch import distributed\n", "torch.distributed") == [1]
    assert names("import torch\ntorch.distributed.barrier()\n", "torch.distributed") == [2, 2]


def asks_cuda(source: str) -> list[int]:
    """Lines that name `torch.cuda`, ask a tensor whether it is there, or pin memory of the host."""
    lines = names(source, "torch.cuda")
    for node in ast.walk(ast.parse(source)) if re.search(r"pin_memory|is_cuda", source) else []:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        # A DataLoader's argument of that name is the user's.
        pins = [k for k in getattr(node, "keywords", []) if k.arg == "pin_memory" and called != "DataLoader"]
        if pins or called.endswith(".pin_memory") or getattr(node, "attr", None) == "is_cuda":
            lines.append(node.lineno)
    return lines


DOOR = PACKAGE / "shared" / "compute" / "cuda.py"


def test_only_one_module_asks_cuda() -> None:
    """So another device can stand behind it (tests/simulated)."""
    assert [dotted(path) for path in MODULES if path != DOOR and asks_cuda(path.read_text())] == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch import cuda",
        "from torch.cuda import Stream",
        "import torch.cuda as c",
        "torch.cuda.synchronize()",
        "flags.is_cuda",
        "torch.empty(1, pin_memory=True)",
        "tensor.pin_memory()",
    ],
)
def test_another_that_asks_is_seen(line: str) -> None:
    assert asks_cuda(line)


def test_the_door_is_seen_to_ask() -> None:
    assert asks_cuda(DOOR.read_text())
    assert not asks_cuda("DataLoader(rows, pin_memory=loader.pin_memory)\nfrom ours import cuda\ncuda.Stream()")


# What has outgrown the rules, by how much, until it is split: it may not grow further.
MODULES_IN = {}


def test_folders_are_small_and_names_apart() -> None:
    """No folder of more than 14 modules, no two names that differ by an ending, one module beside the folders."""
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]
    for folder in {path.parent for path in MODULES}:
        names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
        assert len(names) <= MODULES_IN.get(str(folder.relative_to(PACKAGE)), 14), folder
        assert [(a, b) for a in names for b in names if a != b and b.startswith(a) and len(b) - len(a) <= 3] == []


def test_no_module_imports_the_recipes() -> None:
    """By string neither."""
    assert [dotted(path) for path in MODULES if "lightning_decentral.recipes" in path.read_text()] == []


@pytest.mark.parametrize("path", [p for p in MODULES if len(p.read_text().splitlines()) < 50], ids=dotted)
def test_a_module_of_its_own_however_short_says_why(path: Path) -> None:
    if path.name != "__init__.py":
        assert re.search(
            r"[Ss]hort|[Ss]eparate|stands alone|[Oo]nly", ast.get_docstring(ast.parse(path.read_text())) or ""
        )


def test_modules_stay_below_300_lines() -> None:
    lines = {dotted(path): len(path.read_text().splitlines()) for path in MODULES}
    assert [name for name, count in lines.items() if count > 300] == []
