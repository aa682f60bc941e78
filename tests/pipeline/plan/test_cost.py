"""The cost model recovers costs of its own form exactly, and says how far it's off others."""

import itertools
import math

import pytest

from lightning_decentral.pipeline.plan.cost import CostModel, Measured, fit


def exact(tokens, context):
    return (
        2e-3
        + 1e-5 * tokens
        + 2e-8 * tokens**2
        + (1e-4 + 1e-6 * tokens + 2e-7 * context + 4e-8 * tokens * context if context else 0)
    )


GRID = [(i, j) for i in (16, 32, 64, 128) for j in (0, 32, 100, 400)]


def test_costs_of_its_own_form_are_recovered():
    model = fit([Measured(i, j, exact(i, j)) for i, j in GRID])
    assert model.coefficients == pytest.approx((1e-4, 1e-6, 2e-7, 4e-8), rel=1e-6)
    assert model.error < 1e-9
    for i, j in itertools.product((16, 32, 64, 128), (1, 77, 1000)):
        assert model(i, j) == pytest.approx(exact(i, j), rel=1e-6)


def test_between_and_beyond_the_measured_lengths_it_is_linear():
    model = CostModel(((10, 1.0), (20, 3.0)), (0.0, 0.0, 0.0, 0.0))
    assert [model(i, 0) for i in (10, 15, 20, 30)] == pytest.approx([1.0, 2.0, 3.0, 5.0])
    assert model(1, 0) > 0


def test_the_error_is_that_of_what_does_not_fit():
    noisy = [Measured(i, j, exact(i, j) * (1.1 if (i + j) % 3 else 0.9)) for i, j in GRID if j]
    alone = [Measured(i, 0, exact(i, 0)) for i in (16, 32, 64, 128)]
    model = fit([*alone, *noisy])
    errors = [model(m.tokens, m.context) / m.seconds - 1 for m in noisy]
    assert model.error == pytest.approx(math.sqrt(sum(e * e for e in errors) / len(errors)))
    assert 0.02 < model.error < 0.2


def test_too_few_measurements():
    with pytest.raises(ValueError, match="got 1 lengths without context and 0 measurements with context"):
        fit([Measured(8, 0, 1.0)])
