"""What changes while training, late: buffers, modules."""

from pathlib import Path

import pytest

from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import Full
from tests.compressed.test_changes import Alone, Late, Renewed
from tests.compressed.test_strategy import assert_equal
from tests.partial.towers import run


def partial_backprop() -> PartialBackpropStrategy:
    return PartialBackpropStrategy(depth=Full(), cuts=["network.blocks.1"], start_method="fork")


@pytest.mark.parametrize("made", [Late, Alone])
def test_a_buffer_that_changes_late_is_worker_0_s(tmp_path: Path, made: type[Late]) -> None:
    assert_equal(run(tmp_path, made(), strategy=partial_backprop(), max_steps=6))


def test_a_module_that_comes_after_the_cuts_are_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a parameter is trained that didn't exist in the first step"):
        run(tmp_path, Renewed(), strategy=partial_backprop(), max_steps=6)
