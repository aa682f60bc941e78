"""What a donor gives and what a newcomer gets, over connections of this machine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_decentral.elastic.wire import state_transfer
from lightning_decentral.elastic.wire.sockets import frames
from lightning_decentral.elastic.wire.sockets.frames import LARGEST_BYTES
from lightning_decentral.elastic.wire.sockets.mesh import Mesh
from lightning_decentral.elastic.wire.state_transfer import Donor, fetched
from lightning_decentral.shared.compute.worker_state import digest
from lightning_decentral.shared.wire.plain import pack

pytestmark = pytest.mark.threads
VALUE = {
    "x": torch.arange(300_000, dtype=torch.float64),
    "step": 7,
    "empty": torch.zeros(0),
    "moments": [torch.ones(3)],
}


@contextmanager
def training(donor: Donor, value: Any) -> Iterator[str]:
    """A member that takes steps; where it is reached."""
    mesh, over = Mesh("127.0.0.1", "a", {"heal": donor.serve}, threading.Condition()), threading.Event()

    def steps() -> None:
        while not over.wait(0.005):
            donor.between_steps(lambda: value)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    try:
        yield mesh.place
    finally:
        over.set()
        thread.join()
        mesh.close()


def test_everything_arrives_equal_by_digest() -> None:
    with training(Donor(lambda: ("a", 12)), VALUE) as place:
        value, origin, round = fetched(place, 10.0)
    assert digest(value) == digest(VALUE)
    assert (origin, round) == ("a", 12)


def test_who_is_not_healed_gives_nothing() -> None:
    with training(Donor(lambda: None), VALUE) as place, pytest.raises(OSError, match="ended"):
        fetched(place, 10.0)


def test_a_damaged_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Any] = frames.receive_bytes

    def damaged(*args: Any) -> Any:
        found = whole(*args)
        if len(found) == 300_000 * 8:
            found[-1] ^= 1
        return found

    with training(Donor(lambda: ("a", 12)), VALUE) as place:
        monkeypatch.setattr(frames, "receive_bytes", damaged)
        with pytest.raises(ValueError, match="by their digest"):
            fetched(place, 10.0)


def test_a_model_of_many_tensors_is_given_whatever_a_frame_may_hold() -> None:
    value = {f"layer.{number}.{'x' * 100}": torch.tensor(float(number)) for number in range(10_000)}
    assert len(pack(value).head) > LARGEST_BYTES
    with training(Donor(lambda: ("a", 12)), value) as place:
        assert digest(fetched(place, 10.0)[0]) == digest(value)


def test_a_donor_that_prepares_for_long_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "ALIVE_SECONDS", 0.05)
    donor = Donor(lambda: ("a", 12))

    def slowly() -> Any:
        time.sleep(2.5)
        return VALUE

    mesh = Mesh("127.0.0.1", "a", {"heal": donor.serve}, threading.Condition())
    over = threading.Event()

    def steps() -> None:
        while not over.wait(0.005):
            donor.between_steps(slowly)

    threading.Thread(target=steps, daemon=True).start()
    value, *_ = fetched(mesh.place, 1.5)
    over.set()
    mesh.close()
    assert digest(value) == digest(VALUE)
    assert donor._asked.empty()


def test_what_cannot_be_sent_is_told() -> None:
    with (
        training(Donor(lambda: ("a", 12)), {"x": object()}) as place,
        pytest.raises(ValueError, match="which isn't sent between workers"),
    ):
        fetched(place, 10.0)


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(OSError, match="refused"):
        fetched("127.0.0.1:1", 1.0)
