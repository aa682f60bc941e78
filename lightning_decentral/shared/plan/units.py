"""Reads and prints quantities with units: 200mbit, 100us, 24GB, and bytes with three digits.

This module is short and stands alone because strategies print bytes without the imports of plans and figures."""

import math
import re
from functools import partial

BITS = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
SPANS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1.0}
SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def _number(text: str, units: dict[str, float], wanted: str) -> float:
    """Return the positive number that a text means: 200mbit is 25e6. ValueError for any other text."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-zA-Z]*)", text)
    value = float(found[1]) * units.get(found[2], 0.0) if found else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} isn't {wanted}")
    return value


bytes_per_second = partial(_number, units=BITS, wanted="a rate such as 200mbit or 25gbit")
seconds = partial(_number, units=SPANS, wanted="a time such as 100us or 2ms")
size_bytes = partial(_number, units=SIZES, wanted="a size such as 24GB, 80GiB or 24000000000")


def shown_bytes(value: float) -> str:
    """Format bytes with three digits: 12.3 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B" if value else "0"
