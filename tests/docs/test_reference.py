"""The reference is that of the code: options, names, log keys, errors."""

import ast
import json
import re

import api
import pytest
import reference
from hydra import compose, initialize_config_module

from tests.docs.pages import ROOT

DOCS, PACKAGE = ROOT / "docs", ROOT / "lightning_decentral"
TROUBLE = (DOCS / "errors.md").read_text()


@pytest.mark.parametrize("script", [api, reference], ids=lambda script: script.__name__)
def test_the_page_is_as_generated(script) -> None:  # type: ignore[no-untyped-def]
    assert script.PAGE.filled(script.generated()) == script.PAGE.file.read_text(), (
        f"python docs/scripts/{script.__name__}.py --write"
    )


def test_options_have_a_default_and_words() -> None:
    """Of every option; those of groups and of values compose as they are written."""
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        for name in reference.STRATEGIES:
            rows = re.findall(r"^\| `(\S+)=` \| (.+?) \| (.+) \|$", reference.options(name), re.MULTILINE)
            assert len(rows) > 3
            typed = [f"{word}={value.strip('`')}" if "/" in word else f"{word}=null" for word, value, _ in rows]
            typed = [word for word in typed if not word.endswith("=None")]  # a group's that nobody need choose from
            compose("train", [f"strategy={name}", *typed])
            assert all(said.endswith(".") for _, _, said in rows)


def keys_of_the_code() -> set[str]:
    """Of the callbacks' docstrings and calls; `gossip/{name}` is spelt out in `MixingMonitor`'s docstring."""
    text = "\n".join(path.read_text() for path in (*PACKAGE.rglob("callbacks.py"), PACKAGE / "gossip" / "speed.py"))
    found = re.findall(r"\b(?:gossip|partial|speed|worker)/[a-z_/{}]+[a-z]\b", text.replace("gossip/{name}", ""))
    return {key.replace("{k}", "{rank}") for key in found}


def test_log_keys_are_those_of_the_callbacks() -> None:
    written = re.findall(r"^\| `([^`]+)` \|", (DOCS / "log-keys.md").read_text(), re.MULTILINE)
    assert set(written) == keys_of_the_code()
    assert len(written) == len(set(written)) > 15


def texts() -> list[str]:
    """Every string of the package, with `...` in the place of what is filled in."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def fixed(error: str) -> list[str]:
    return [words.strip() for words in error.split("...") if len(words.strip()) > 3]


def said(error: str, text: str) -> bool:
    """The fixed words stand in this text, in their order."""
    return re.search(".*".join(map(re.escape, fixed(error))), text, re.DOTALL) is not None


def test_every_error_of_the_page_is_one_of_the_package() -> None:
    page = TROUBLE.partition("## Not an error")[0]
    errors = re.findall(r"^\| (?:`` (.+?) ``|`([^`]+)`) \| .+ \|$", page, re.MULTILINE)
    quoted = [double or single for double, single in errors]
    assert len(quoted) >= 30
    known = texts()
    missing = [error for error in quoted if not any(said(error, text) for text in known)]
    assert not missing
    ends = [row["outcome"] for row in json.loads((ROOT / "benchmarks/results/faults-2-cores.json").read_text())["rows"]]
    lines, on = ends.count("one line"), ends.count("goes on")
    assert f"Of {len(ends)} faults {lines} end with one line, and under {on} training goes on." in TROUBLE
    assert lines + on == len(ends)
    assert not any(said("worker ... ate all of the biscuits", text) for text in known)


def test_every_face_has_a_page_of_whole_docstrings() -> None:
    pages = {path.stem: path.read_text() for path in api.WHOLE.iterdir() if path != api.PAGE.file}
    assert pages == {f: api.whole(f) for f in api.FACES}
