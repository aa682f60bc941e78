"""Rotary embeddings that depend on how long a call is, which slices can't know.

A short module of its own: both the small copy and the model that is cut read configurations by it.
"""

from typing import Any


def ropes(config: Any) -> list[dict[str, Any]]:
    """List the parameters of a configuration's rotary embeddings; some models have several."""
    given = vars(config).get("rope_parameters") or {}
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def reach(config: Any) -> int | None:
    """The length from which on frequencies depend on the longest position of a call; None: they never do."""
    own = [
        rope for rope in ropes(config) if "dynamic" in rope.get("rope_type", "") or rope.get("rope_type") == "longrope"
    ]
    known = [rope.get("original_max_position_embeddings") for rope in own]
    return min((length for length in [*known, config.max_position_embeddings] if length), default=None) if own else None
