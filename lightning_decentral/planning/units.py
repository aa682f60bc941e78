"""Numbers with units on the command line."""

import re

RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
SPANS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "": 1.0}


def bytes_per_second(text: str) -> float:
    """200mbit is 25e6. ValueError where it isn't a positive rate."""
    return _number(text, RATES, "a rate such as 200mbit or 25gbit")


def seconds(text: str) -> float:
    """100us is 1e-4. ValueError where it isn't a positive time."""
    return _number(text, SPANS, "a time such as 100us or 2ms")


def size_bytes(text: str) -> float:
    """24GB is 24e9. ValueError where it isn't a positive size."""
    return _number(text, SIZES, "a size such as 24GB, 80GiB or 24000000000")


def _number(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-zA-Z]*)", text)
    if not found or found[2] not in units or not float(found[1]):
        raise ValueError(f"{text!r} isn't {wanted}")
    return float(found[1]) * units[found[2]]


def shown_bytes(value: float) -> str:
    """With three digits: 12.3 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B" if value else "0"
