"""The table of measured losses: what is read of it, and which setting is nearest to a user's."""

import pytest

from lightning_decentral.planner.forecasts import composed
from lightning_decentral.shared.plan.known_losses import (
    BASELINE,
    RECIPES,
    kind_of,
    known_losses,
    nearest,
    overrides_of,
)

METHODS = sorted({method for known in known_losses() for method in known.batches if overrides_of(method)})


def test_every_setting_has_the_baseline_and_it_reaches_its_own_loss() -> None:
    for known in known_losses():
        assert known.share(BASELINE) == 1
        assert known.ends[BASELINE] == pytest.approx(known.loss, abs=5e-4)
        assert known.kind in RECIPES.values()


def test_a_method_that_ends_above_the_loss_never_gets_there() -> None:
    """But for one that was there between two marks and left again: a mean over seeds isn't monotonous."""
    found = [(known, method) for known in known_losses() for method in known.batches]
    assert all(known.share(method) for known, method in found if known.ends[method] <= known.loss)
    assert any(known.share(method) is None for known, method in found)
    assert known_losses()[0].share("no such method") is None


@pytest.mark.parametrize("method", METHODS)
def test_its_overrides_train_with_the_optimizer_of_the_name(method: str) -> None:
    overrides = overrides_of(method)
    assert overrides
    made = composed(overrides)
    assert made.optimizer == ("muon" if "Muon" in method else "accum_adamw")
    assert made.accumulated == (4 if "accumulating 4" in method else 1)


def test_the_nearest_by_workers_batch_and_size() -> None:
    def asked(workers: int, batch: int, parameter_bytes: int) -> tuple[str, int]:
        found = nearest("text", workers, batch, parameter_bytes)
        assert found is not None
        return found.recipe, found.workers

    assert asked(4, 4, 1_000_000) == ("gpt", 4)
    assert asked(4, 32, 1_000_000) == ("gpt-1024-tokens", 4)
    assert asked(4, 4, 100_000_000) == ("larger-gpt", 4)
    assert asked(64, 4, 1_000_000) == ("gpt", 16)
    assert nearest("sounds", 4, 4, 1) is None


def test_a_recipe_has_a_kind_and_a_module_of_ones_own_has_none() -> None:
    assert kind_of(("recipe=gpt", "data.batch_size=8")) == "text"
    assert kind_of(("model=mine",)) is None
