"""A seed of its own for each test: `seed_everything` writes it into the environment, where later tests find it."""

import pytest


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
