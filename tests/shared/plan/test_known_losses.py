"""The table of measured losses: what is read of it, and which setting is nearest to a user's."""

import pytest

from lightning_decentral.planner.forecasts import composed
from lightning_decentral.shared.plan.known_losses import (
    BASELINE,
    RECIPES,
    KnownLosses,
    kind_of,
    known_losses,
    nearest,
)

MEASURED = [(known, method) for known in known_losses() for method in known.overrides]


def test_every_setting_has_the_baseline_which_reaches_its_own_loss() -> None:
    for known in known_losses():
        assert known.share(BASELINE) == 1
        assert known.kind in RECIPES.values()
    assert known_losses()[0].share("no such method") is None
    assert known_losses()[0].share("ddp, PowerSGD") is None  # it ends above


@pytest.mark.parametrize(("known", "method"), MEASURED, ids=lambda value: str(value))
def test_its_overrides_train_with_the_optimizer_of_the_name(known: KnownLosses, method: str) -> None:
    made = composed(known.overrides[method])
    assert made.optimizer == ("muon" if "Muon" in method else "accum_adamw")
    assert made.accumulated == (4 if "accumulating 4" in method else 1)


def test_overrides_have_the_rate_that_was_tuned_for_the_model() -> None:
    by_recipe = {known.recipe: known for known in known_losses() if known.workers == 4}
    assert "optimizer.lr=0.01" in by_recipe["vit"].overrides["gossip, int4 differences, Muon"].split()
    assert "optimizer.lr=3e-2" in by_recipe["gpt"].overrides["gossip, int4 differences, Muon"].split()
    for known, method in MEASURED:
        keys = [word.partition("=")[0] for word in known.overrides[method].split()]
        assert len(keys) == len(set(keys))


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
    assert kind_of(("+recipe=gpt",)) == "text"
    assert kind_of(("recipe=gpt", "model=resnet")) is None
    assert kind_of(("model=mine",)) is None
