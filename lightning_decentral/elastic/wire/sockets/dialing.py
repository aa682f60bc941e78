"""Connections to other members, under the run's key."""

import socket
from dataclasses import dataclass

from lightning_decentral.elastic.wire.sockets.frames import connected
from lightning_decentral.elastic.wire.sockets.keys import Key


@dataclass
class Dialer:
    """Connects to members. `key`: None where the run has none."""

    key: Key | None = None

    def __call__(self, to: str, place: str, wants: str, seconds: float) -> socket.socket:
        """Connect to the member of this name and address for a service. OSError if it isn't reached."""
        return connected(place, wants, seconds, self.key)
