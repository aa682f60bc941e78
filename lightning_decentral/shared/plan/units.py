"""Bytes as a person reads them."""


def shown_bytes(value: float) -> str:
    """Format bytes with three digits: 12.3 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B" if value else "0"
