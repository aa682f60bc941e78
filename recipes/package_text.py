"""The Python files of an installed package as a text: megabytes without a download. They differ between its versions.

SymPy, which torch requires, has 17 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_decentral.recipes.text import Text
from lightning_decentral.recipes.tokens import Tokenizer


class PackageText(Text):
    """The rest of the options are those of `Text`.

    Args:
        package: its name as it is imported, dots allowed; folders named `tests` are left out.

    Raises:
        ValueError: it isn't installed, or is a single module.
    """

    def __init__(
        self,
        *,
        package: str,
        length: int,
        batch_size: int,
        tokenizer: Tokenizer | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(length=length, batch_size=batch_size, tokenizer=tokenizer, num_workers=num_workers, seed=seed)
        self.package = package

    def texts(self) -> Sequence[str]:
        """One for each file, by its path."""
        folder = _folder(self.package)
        files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
        return [(folder / path).read_text(encoding="utf-8") for path in files if "tests" not in path.parts]


def _folder(package: str) -> Path:
    try:
        found = find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"no installed package is named {package!r}: pip install it, or take data.package=sympy")
    return Path(found.submodule_search_locations[0])
