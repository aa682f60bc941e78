"""What a piece does in a rehearsal, as a program of its own that needs nothing but Python, so that it starts at once.

    python stand_in.py sleep              # each line "core seconds" of the input: wait so long, answer "done"
    python stand_in.py compute RATE       # the same with seconds * RATE rounds of hashing, on that core
    python stand_in.py calibrate SECONDS  # rounds per second on one core

It ends with its input, so a parent that is killed leaves nothing behind.
"""

import hashlib
import os
import sys
import time

BLOCK = bytes(1 << 14)


def rounds(number: int) -> None:
    """Work that takes the processor and no memory to speak of."""
    for _ in range(number):
        hashlib.sha256(BLOCK).digest()


def rate(seconds: float) -> float:
    """Rounds per second, measured for so long."""
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        rounds(50)
        number += 50
    return number / (time.perf_counter() - began)


def serve(kind: str, rounds_per_second: float) -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        core, seconds = line.split()
        if kind == "compute":
            os.sched_setaffinity(0, {int(core)})
            rounds(round(float(seconds) * rounds_per_second))
        else:
            time.sleep(float(seconds))
        print("done", flush=True)


if __name__ == "__main__":
    kind, *number = sys.argv[1:]
    if kind == "calibrate":
        print(rate(float(number[0])), flush=True)
    else:
        serve(kind, float(number[0]) if number else 0.0)
