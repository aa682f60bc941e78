"""The entry points that pyproject.toml promises, whether or not this checkout has been installed since."""

from pathlib import Path

import pytest

from tests.packaging.project import PROJECT


@pytest.fixture
def entry_points(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path_factory.mktemp("site")
    metadata = site / "lightning_decentral-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: 0.0.0\n")
    lines = []
    for group, entries in PROJECT["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)
    return site
