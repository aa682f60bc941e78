"""The mean model by itself: workers are numbers, their mean is computed here."""

import torch
from torch import Tensor, nn

from lightning_decentral.shared.wire.mean import MeanModel


def worker(*others: float) -> tuple[MeanModel, nn.Module]:
    """A worker with a linear layer, whose mean is taken with workers that hold these numbers everywhere."""
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))

    def mean_of(tensors: list[Tensor]) -> list[Tensor]:
        return [(t.detach() + sum(others)) / (1 + len(others)) for t in tensors]

    return MeanModel(mean_of), module


def floats(module: nn.Module) -> list[Tensor]:
    return [t for t in module.state_dict(keep_vars=True).values() if t.is_floating_point()]


def test_the_mean_is_shown_and_taken_back_bit_for_bit() -> None:
    mean_model, module = worker(3.0, 5.0)
    before = [t.detach().clone() for t in floats(module)]
    mean_model.diverged = True
    mean_model.show(floats(module))
    assert all(torch.equal(t, (b + 8) / 3) for t, b in zip(floats(module), before, strict=True))
    mean_model.hide()
    assert all(torch.equal(t, b) for t, b in zip(floats(module), before, strict=True))
    assert mean_model.diverged


def test_a_state_dict_is_the_workers_own_while_the_mean_is_shown() -> None:
    mean_model, module = worker(7.0)
    own = {key: value.clone() for key, value in module.state_dict().items()}
    mean_model.show(floats(module))
    shown = module.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in mean_model.own(shown).items())
    assert not torch.equal(shown["0.weight"], own["0.weight"])
    mean_model.hide()
    state = module.state_dict()
    assert mean_model.own(state) is state


def test_taken_for_good_nobody_is_apart() -> None:
    mean_model, module = worker(1.0)
    mean_model.diverged = True
    before = module[0].weight.detach().clone()
    mean_model.take(floats(module))
    assert torch.equal(module[0].weight, (before + 1) / 2)
    assert not mean_model.diverged


def test_hiding_what_was_never_shown_or_was_given_away_changes_nothing() -> None:
    mean_model, module = worker(1.0)
    mean_model.hide()
    mean_model.show(floats(module))
    shown = [t.detach().clone() for t in floats(module)]
    mean_model.forget()
    mean_model.hide()
    assert all(torch.equal(a, b) for a, b in zip(floats(module), shown, strict=True))
