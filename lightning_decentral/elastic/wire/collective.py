"""Collectives of members outside their gossip rounds: all send a value to the oldest, which returns one result to all.

    result = assembly.meet((round, 0), value, mean, members, seconds)

A member also answers requests for values that it keeps: `begun` (the founder's decisions during set-up), the state for
newcomers of a view (`keep`), and results.

A member that loses the oldest asks the next oldest, which has the result too, or makes one of the values it receives.
So no member waits for one that has ended, and no new view (membership) is needed. The oldest stores all members'
values. Members cut off from each other, but not from the lobby, may get different results."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_decentral.elastic.plan.view import shown
from lightning_decentral.elastic.wire.sockets.dialing import Dialer
from lightning_decentral.elastic.wire.sockets.frames import (
    UNREAD_SECONDS,
    readable,
    receive,
    receive_value,
    send_value,
)
from lightning_decentral.shared.wire.plain import NotPlain

Key = tuple[int, int]  # (round, number in that round): it rises
KEPT = 2  # results kept for members that ask again: no member is further ahead than this
LOOK_SECONDS = 0.1  # seconds between two checks which members still live
ASK_SECONDS = 0.5  # seconds until members that sent no value are asked for a result
ANSWER_SECONDS = 10.0  # seconds of silence until a member is asked again for a kept value
KEPT_SECONDS = 0.05  # seconds between two requests for a kept value
LEAVE_SECONDS = 10.0


class Collective:
    """One member's part in the collectives; `place` maps a member's name to its address (host:port)."""

    def __init__(self, name: str, place: Callable[[str], str], dial: Dialer | None = None) -> None:
        self.name = name
        self._place, self._dial = place, dial or Dialer()
        self._changed = threading.Condition()
        self._given: dict[Key, dict[str, Any]] = {}
        self._results: dict[Key, Any] = {}
        self._now: Key = (-1, 0)  # the present collective of this member; earlier ones are over
        self._kept: tuple[int, Any] = (0, None)
        self.begun: list[Any] = []  # the founder's decisions so far, during set-up
        self.set_up = False  # whether `begun` is complete: a worker that asks for more uses its own values
        self._serving = 0
        self._closed = False

    def meet(
        self,
        key: Key,
        value: Any,  # tensors and plain values
        made: Callable[[Sequence[Any]], Any],  # makes the result of the members' values, the oldest's first
        members: Callable[[], Sequence[str]],  # members that may still call, this one too, the oldest first
        seconds: float,  # after which the result is made without members that haven't called
    ) -> Any:
        """Return one result to all members that call this with the same key. Collective."""
        self.begins(key)
        end, failed = time.monotonic() + seconds, set[str]()  # members that failed once aren't asked again
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
        """Record that this member has reached the collective `key`, and sends no value to earlier collectives."""
        with self._changed:
            self._now = max(self._now, key)
            self._changed.notify_all()

    def keep(self, view: int, value: Any) -> None:
        """Keep a value for newcomers whose first view has this number."""
        with self._changed:
            self._kept = view, value

    def kept(self, view: int, members: Callable[[], Sequence[str]], seconds: float) -> Any:
        """Wait for the value that one of these members keeps for newcomers of this view; None if no member is left that
        could have it."""
        end = time.monotonic() + seconds
        while (asked := members()) and time.monotonic() < end:
            later = 0
            for name in asked:
                found, value, over = self.found(name, ("view", view))
                if found:
                    return value
                later += over
            if later == len(asked):  # all keep a later view's value: this newcomer comes too late
                break
            time.sleep(KEPT_SECONDS)
        return None

    def close(self) -> None:
        """Send the results that others wait for; later requests must go to another member."""
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
                # An older member may have sent it the result, and have ended before all had it.
                for name in missing:
                    found, result, passed = self.found(name, key)
                    if found:
                        return result
                    over |= {name} if passed else set()  # this member is in a later round, and sends no value any more
            if time.monotonic() > end:
                break
        oldest = [name for name in members() if name in given]  # by age, then members that left after they sent a value
        return made([given[name] for name in (*oldest, *sorted(set(given) - set(oldest)))])

    def found(self, name: str, key: Sequence[Any]) -> tuple[bool, Any, bool]:
        """Ask a member for a kept value: return (whether it has the value, the value, whether it never will)."""
        with (
            suppress(OSError, ValueError, KeyError, TypeError),
            self._dial(name, self._place(name), "meet", 5.0) as connection,
        ):
            send_value(connection, {"from": self.name, "asks": list(key)}, None)
            connection.settimeout(ANSWER_SECONDS)
            result = receive_value(connection, header := receive(connection))
            return bool(header["found"]), result, bool(header["over"])
        return False, None, False

    def _publish(self, key: Key, result: Any) -> None:
        with self._changed:
            self._results[key] = result
            self._results = dict(sorted(self._results.items())[-KEPT:])  # members that lost the oldest may still ask
            self._given = {other: given for other, given in self._given.items() if other > key}
            self._changed.notify_all()

    def _ask(self, first: str, key: Key, value: Any, there: Callable[[], bool], end: float) -> Any:
        """Send a value to the oldest and return its result. OSError if it has ended, or has no result."""
        with self._dial(first, self._place(first), "meet", 5.0) as connection:
            send_value(connection, {"key": list(key), "from": self.name}, value)
            while not readable(connection, LOOK_SECONDS):
                if not there() or time.monotonic() > end:
                    raise ConnectionResetError(f"{shown(first)} has ended")
            connection.settimeout(None)  # a large result may take long, and the oldest lives
            return receive_value(connection, receive(connection))

    def serve(self, connection: socket.socket) -> None:
        """Receive a member's value and send it the result when there is one; send nothing if there will be none."""
        header = receive(connection)
        connection.settimeout(UNREAD_SECONDS)  # the value may be large
        value = receive_value(connection, header)
        if "asks" in header:
            found, over, value = self._has(*header["asks"])
            try:
                send_value(connection, {"found": found, "over": over}, value)
            except NotPlain:  # one of set-up can't be sent: each worker uses its own
                send_value(connection, {"found": False, "over": over or header["asks"][0] == "begun"}, None)
            return
        round, nth = header["key"]
        key = int(round), int(nth)
        with self._changed:
            self._serving += 1  # `close` waits until promised results have been sent
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
        """Look up a kept value: return (whether this member has the value, whether it never will, the value)."""
        if what == "begun":
            over, begun = self.set_up, self.begun[nth : nth + 1]  # `set_up` first, as nothing is added after it
            return bool(begun), over, begun[0] if begun else None
        if what == "view":
            view, kept = self._kept
            return view == nth, view > nth, kept if view == nth else None
        key = int(what), int(nth)
        return key in self._results, self._now > key, self._results.get(key)
