"""The tables of docs/options.md, from the constructors' text and from conf/.

    python docs/scripts/reference.py            # prints them
    python docs/scripts/reference.py --write    # between the marks of the page

Reads source text only: neither torch nor Lightning is imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from page import ROOT, Page

CONF, PAGE = ROOT / "conf", Page(ROOT / "docs" / "options.md", "reference.py")
STRATEGIES = {
    "gossip": ("gossip", "GossipStrategy"),
    "compressed": ("compressed", "CompressedStrategy"),
    "token_pipeline": ("pipeline", "TokenPipelineStrategy"),
    "partial_backprop": ("partial", "PartialBackpropStrategy"),
    "spilled": ("spilled", "SpilledStrategy"),
}


def constructor(folder: str, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """(default of each keyword as source text, what the class's docstring says of it)."""
    tree = ast.parse((ROOT / "lightning_decentral" / folder / "strategy.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (init,) = (node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    pairs = zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
    defaults = {argument.arg: ast.unparse(default) for argument, default in pairs if default is not None}
    return defaults, arguments(ast.get_docstring(found) or "")


def arguments(docstring: str) -> dict[str, str]:
    """First sentence of each entry under `Args:`."""
    section = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {6,}.*)*)", section, re.MULTILINE)
    texts = {}
    for names, text in entries:
        for name in names.split(", "):
            texts[name] = re.sub(r"\s+", " ", text).strip()
    return texts


def choices(group: Path) -> list[str]:
    return sorted(file.stem for file in group.glob("*.yaml"))


def default(name: str, option: str, written: str) -> str:
    """What the command line composes where an option is a group; else the constructor's default."""
    head = (CONF / "strategy" / f"{name}.yaml").read_text().partition("_target_")[0]
    chosen = re.search(rf"^  - {option}: (\w+)$", head, re.MULTILINE)
    return f"`{chosen[1]}`" if chosen else "5 minutes" if written == "TIMEOUT" else f"`{written}`"


def options(name: str) -> str:
    """One strategy's table; of an option that is a group, the word to type."""
    defaults, texts = constructor(*STRATEGIES[name])
    lines = ["| option | default | what it chooses |", "| --- | --- | --- |"]
    for option, written in defaults.items():
        text = texts.get(option, "how long a worker waits for another, anywhere, before it ends.").replace("|", "\\|")
        lines.append(f"| `{word(name, option)}` | {default(name, option, written)} | {text} |")
    return "\n".join(lines)


def word(name: str, option: str) -> str:
    """What to type before the value; `+` adds a key that the YAML leaves to the constructor."""
    keys = re.findall(r"^(\w+):|^  - (\w+): ", (CONF / "strategy" / f"{name}.yaml").read_text(), re.MULTILINE)
    plus = "" if option in {key for pair in keys for key in pair} else "+"
    return f"{plus}strategy{'/' if (CONF / 'strategy' / option).is_dir() else '.'}{option}="


def groups() -> Iterator[str]:
    """Every group of conf/ with its choices."""
    yield "| group | choices |\n| --- | --- |"
    for folder in sorted(path for path in CONF.rglob("*") if path.is_dir() and choices(path)):
        yield f"| `{folder.relative_to(CONF)}` | {', '.join(f'`{one}`' for one in choices(folder))} |"


def generated() -> str:
    parts = [f"## `{name}`\n\n{options(name)}" for name in STRATEGIES]
    return "\n\n".join([*parts, "## Groups of the recipes\n\n" + "\n".join(groups())])


if __name__ == "__main__":
    PAGE.show_or_write(generated())
