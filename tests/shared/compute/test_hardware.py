"""How fast the hardware is: processors against the clock."""

import pytest

from lightning_decentral.shared.compute import hardware
from lightning_decentral.shared.compute.hardware import ProcessorTime


@pytest.mark.parametrize(("wall", "busy", "crowding"), [(3.0, 3.0, 1.0), (3.0, 1.5, 2.0), (3.0, 12.0, 0.25)])
def test_crowding_is_what_a_second_of_a_processor_takes(
    wall: float, busy: float, crowding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0, 0.0]
    monkeypatch.setattr(hardware, "perf_counter", lambda: now[0])
    monkeypatch.setattr(hardware, "process_time", lambda: now[1])
    found = ProcessorTime()
    assert found.crowding == 1.0, "nothing was measured"
    for _ in range(3):
        found.start()
        now[:] = now[0] + wall, now[1] + busy
        found.stop()
        now[:] = now[0] + 100, now[1] + 7  # between two steps
    assert found.crowding == pytest.approx(crowding)
