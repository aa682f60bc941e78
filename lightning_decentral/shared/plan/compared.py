"""What two workers were given, compared: the first difference, as one line with both values and the remedy.

Every set-up says it so, however its workers meet: over a store (Trainers, Fabric), in a group, at an elastic lobby.
"""

from collections.abc import Mapping

Given = Mapping[str, str]
"""{name: what a worker has}; what isn't there is `no name`."""
SAME, SAME_MODEL = "give every worker the same", "every worker must build the same model"


def settings_difference(mine: Given, theirs: Given, me: str, they: str) -> str:
    """Of settings, in their order; empty for none. `me`, `they`: who has the one and the other."""
    name = first_difference(mine, theirs)
    return name and f"{me} has {_setting(name, mine)}, {they} has {_setting(name, theirs)}: {SAME}"


def model_difference(mine: Given, theirs: Given, me: str, they: str) -> str:
    """The same of models (`layout.described`)."""
    name = first_difference(mine, theirs)
    return name and f"{me} has {_tensor(name, mine)} where {they} has {_tensor(name, theirs)}: {SAME_MODEL}"


def first_difference(mine: Given, theirs: Given) -> str:
    """Its name; empty for none."""
    return next((name for name in (*theirs, *mine) if theirs.get(name) != mine.get(name)), "")


def _setting(name: str, given: Given) -> str:
    return f"{name}={given[name]}" if name in given else f"no {name}"


def _tensor(name: str, given: Given) -> str:
    return f"{name} {given[name]}" if name in given else f"no {name}"
