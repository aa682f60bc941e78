"""Frames come in pieces; what isn't one, and guests of other jobs, are refused."""

import pytest

from lightning_decentral.elastic.wire.sockets.frames import LARGEST_BYTES, Frames, _job, address, frame, wanted
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_frames_come_in_pieces_of_any_size(size: int) -> None:
    messages = [{"a": [1, 2.5, None]}, [], "text" * 50]
    sent, frames = b"".join(map(frame, messages)), Frames()
    found = [m for start in range(0, len(sent), size) for m in frames.feed(sent[start : start + size])]
    assert found == messages


@pytest.mark.parametrize("bytes", [b"GET / HTTP/1.1\r\n", (LARGEST_BYTES).to_bytes(4, "big"), b"\0\0\0\1{"])
def test_what_is_no_frame_is_an_error(bytes: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|Expecting"):
        Frames().feed(bytes)


def greeting(wants: str) -> dict[str, str]:
    return {"job": _job(), "wants": wants}


def test_a_guest_of_another_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted(greeting("lobby"), "lobby", "heal") == "lobby"
    with pytest.raises(ValueError, match="same version"):
        wanted(greeting("tea"), "lobby")
    found = greeting("lobby")
    monkeypatch.setenv(TOKEN, "another")
    for stranger in (found, None, [], {"job": 3}):
        with pytest.raises(ValueError, match="another job"):
            wanted(stranger, "lobby")


@pytest.mark.parametrize("place", ["host", ":29400", "host:", "host:0", "host:65536", "host:x"])
def test_a_place_has_a_host_and_a_port(place: str) -> None:
    assert address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    with pytest.raises(ValueError, match="HOST:PORT"):
        address(place)
