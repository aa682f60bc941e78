"""Collectives of members outside of their rounds: all give something to the oldest, one result comes back to all.

    result = assembly.meet((round, 0), value, mean, members, seconds)

What one member keeps others ask it for: `begun`, decisions of the worker with whom the run began, while they are set
up; what newcomers of a view take over (`keep`); results.

Who loses the oldest turns to the next one, who has that result too, or makes one of what it is given then: nobody waits
for who has ended, and nobody needs a new view. The oldest holds what all have given. Members that are cut off from each
other, and from no lobby, may get different results.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_decentral.elastic.plan.view import shown
from lightning_decentral.elastic.wire.sockets.frames import (
    UNREAD_SECONDS,
    connected,
    receive,
    receive_value,
    send_value,
)
from lightning_decentral.shared.wire.plain import NotPlain

Key = tuple[int, int]  # (round, number in that round): it rises
KEPT = 2  # results, for members that ask again: none can be further ahead of another
LOOK_SECONDS = 0.1  # seconds between two looks at who is still there
ASK_SECONDS = 0.5  # seconds until members that haven't given anything are asked whether they have a result
ANSWER_SECONDS = 10.0  # seconds of silence, until a member is asked again for what it keeps
KEPT_SECONDS = 0.05  # seconds between two questions for what is kept
LEAVE_SECONDS = 10.0


class Collective:
    """One member's part; `place` is where a member of a name is reached."""

    def __init__(self, name: str, place: Callable[[str], str]) -> None:
        self.name = name
        self._place = place
        self._changed = threading.Condition()
        self._given: dict[Key, dict[str, Any]] = {}
        self._results: dict[Key, Any] = {}
        self._now: Key = (-1, 0)  # what this member meets for; what was before is over for it
        self._kept: tuple[int, Any] = (0, None)
        self.begun: list[Any] = []  # what was decided so far while this worker is set up
        self.set_up = False  # whether no more of that follows: who asks for more uses its own
        self._serving = 0
        self._closed = False

    def meet(
        self,
        key: Key,
        value: Any,  # tensors and plain values
        made: Callable[[Sequence[Any]], Any],  # the result, of what members have given, the oldest's first
        members: Callable[[], Sequence[str]],  # those that may still come, itself included, the oldest first
        seconds: float,  # until the result is made without those that haven't come
    ) -> Any:
        """The same for all members that call it with this key."""
        self.begins(key)
        end, failed = time.monotonic() + seconds, set[str]()  # who has failed once isn't asked again
        while (first := next((n for n in members() if n not in failed), self.name)) != self.name:
            try:
                result = self._ask(first, key, value, lambda first=first: first in members(), end + seconds)  # type: ignore[misc]
                break
            except (OSError, ValueError, KeyError, TypeError):
                failed.add(first)  # the next oldest has the result, or makes one
        else:
            result = self._preside(key, value, made, lambda: [n for n in members() if n not in failed], end)
        self._publish(key, result)
        return result

    def begins(self, key: Key) -> None:
        """This member is there, and gives nothing any more to what was before."""
        with self._changed:
            self._now = max(self._now, key)
            self._changed.notify_all()

    def keep(self, view: int, value: Any) -> None:
        """Keep a value for members whose first view this is."""
        with self._changed:
            self._kept = view, value

    def kept(self, view: int, members: Callable[[], Sequence[str]], seconds: float) -> Any:
        """Wait for what the first one of these members has kept for this view; None where none will. They may have it,
        or will when they are there."""
        end = time.monotonic() + seconds
        while (asked := members()) and time.monotonic() < end:
            for name in asked:
                found, value, _ = self.found(name, ("view", view))
                if found:
                    return value
            time.sleep(KEPT_SECONDS)
        return None

    def close(self) -> None:
        """Give out what was promised; who comes later turns to another member."""
        end = time.monotonic() + LEAVE_SECONDS
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._serving and time.monotonic() < end:
                self._changed.wait(LOOK_SECONDS)

    def _preside(
        self, key: Key, value: Any, made: Callable[[Sequence[Any]], Any], members: Callable[[], list[str]], end: float
    ) -> Any:
        over = set[str]()
        with self._changed:
            given = self._given.setdefault(key, {})
            given[self.name] = value
        while missing := [name for name in members() if name not in given and name not in over]:
            with self._changed:
                complete = self._changed.wait_for(lambda: all(name in given for name in missing), ASK_SECONDS)
            if not complete:
                # An older member may have given it the result, and have ended before all had it.
                for name in missing:
                    found, result, passed = self.found(name, key)
                    if found:
                        return result
                    over |= {name} if passed else set()  # it is in a later round: it gives nothing any more
            if time.monotonic() > end:
                break
        oldest = [name for name in members() if name in given]  # in the order of ages; then who left after it gave
        return made([given[name] for name in (*oldest, *sorted(set(given) - set(oldest)))])

    def found(self, name: str, key: Sequence[Any]) -> tuple[bool, Any, bool]:
        """Ask a member: (whether it has what is asked for, that, whether it won't have it any more)."""
        with (
            suppress(OSError, ValueError, KeyError, TypeError),
            connected(self._place(name), "meet", 5.0) as connection,
        ):
            send_value(connection, {"from": self.name, "asks": list(key)}, None)
            connection.settimeout(ANSWER_SECONDS)
            header, result = receive_value(connection)
            return bool(header["found"]), result, bool(header["over"])
        return False, None, False

    def _publish(self, key: Key, result: Any) -> None:
        with self._changed:
            self._results[key] = result
            self._results = dict(sorted(self._results.items())[-KEPT:])  # who lost the oldest may still ask
            self._given = {other: given for other, given in self._given.items() if other > key}
            self._changed.notify_all()

    def _ask(self, first: str, key: Key, value: Any, there: Callable[[], bool], end: float) -> Any:
        """OSError where it has ended, or has no result to give."""
        with connected(self._place(first), "meet", 5.0) as connection:
            send_value(connection, {"key": list(key), "from": self.name}, value)
            connection.settimeout(LOOK_SECONDS)
            while True:
                with suppress(TimeoutError):
                    if not connection.recv(1, socket.MSG_PEEK):  # what comes stays to be read
                        raise ConnectionResetError("the connection has ended")
                    break
                if not there() or time.monotonic() > end:
                    raise ConnectionResetError(f"{shown(first)} has ended")
            connection.settimeout(None)  # a large result may take long, and the oldest is there
            return receive_value(connection)[1]

    def serve(self, connection: socket.socket) -> None:
        """Take what a member gives, and answer it when there is a result; by nothing where there will be none."""
        header = receive(connection)
        connection.settimeout(UNREAD_SECONDS)  # the value may be large
        header, value = receive_value(connection, header)
        if "asks" in header:
            found, over, value = self._has(*header["asks"])
            try:
                send_value(connection, {"found": found, "over": over}, value)
            except NotPlain:  # it can't be sent: each has its own
                send_value(connection, {"found": False, "over": True}, None)
            return
        round, nth = header["key"]
        key = int(round), int(nth)
        with self._changed:
            self._serving += 1  # `close` waits for those to whom a result is promised
            self._given.setdefault(key, {})[str(header["from"])] = value
            self._changed.notify_all()
        try:
            with self._changed:
                # Notified by `begins`, `_publish` and `close`.
                while key not in self._results and self._now <= key and not self._closed:
                    self._changed.wait(1.0)
                made, result = key in self._results, self._results.get(key)
            if made:
                send_value(connection, {}, result)
        finally:
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def _has(self, what: Any, nth: int) -> tuple[bool, bool, Any]:
        """(whether this member has what is asked for, whether it won't have it any more, that)."""
        if what == "begun":
            over, begun = self.set_up, self.begun[nth : nth + 1]  # in this order: none is added behind it
            return bool(begun), over, begun[0] if begun else None
        if what == "view":
            view, kept = self._kept
            return view == nth, False, kept if view == nth else None
        key = int(what), int(nth)
        return key in self._results, self._now > key, self._results.get(key)
