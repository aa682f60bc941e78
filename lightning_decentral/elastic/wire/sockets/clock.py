"""Clock for an elastic run's timeouts that counts the time of a suspended host; Linux's monotonic clock doesn't.

Short, as it is one rule: a worker that was suspended must find out that it was."""

import time

NAME = vars(time).get("CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # elsewhere the monotonic clock goes on


def now() -> float:
    """Return the seconds since a fixed moment in the past."""
    return time.clock_gettime(NAME)
