"""What sleeping members of a sweep measure: a device has one of them at a time, by a clock that all of them share."""

from itertools import pairwise

import pytest

from lightning_decentral.sweep import RoundRobin
from sweep.devices import Job, shared


@pytest.mark.timeout(60)
def test_a_grant_begins_after_the_one_before_has_ended() -> None:
    found = shared([Job(30, 0.002)] * 2, 1, RoundRobin(), 0.001)
    assert len(found["grants"]) == 60
    assert all(before[1] <= after[0] for before, after in pairwise(found["grants"]))
    assert found["seconds"] >= 60 * 0.002
    assert 0 < found["busy"] <= 1
