"""The clock of elastic times: it goes on while a host is suspended, whose monotonic clock stands still on Linux.

Short, as it is one rule: who was away must find out that it was.
"""

import time

NAME = vars(time).get("CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # elsewhere the monotonic clock goes on


def now() -> float:
    """Seconds since some moment."""
    return time.clock_gettime(NAME)
