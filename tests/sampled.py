"""Of tests marked `sampled`, each of which costs seconds a case, `make test` takes some cases; `make thorough` all.

Where arguments are crossed, as many as have each value once; the first case that adds the most values comes first:

    a in (1, 2, 3), b in (x, y):    1 x,  2 y,  3 x    of six

Of a list, one argument's values or cases of which more than half would be needed for that, one in four:

    a in (1, ..., 9):    1, 5, 9
"""

from collections.abc import Mapping

SHARE = 4
"""Of a list one in so many."""


def left_out(cases: Mapping[str, Mapping[str, object]]) -> set[str]:
    """Of one test's cases, {name: {argument: value}}, those that `make test` doesn't take."""
    values = {name: {(argument, str(value)) for argument, value in given.items()} for name, given in cases.items()}
    left, wanted = list(values), set().union(*values.values())
    while wanted:
        most = max(left, key=lambda name: len(values[name] & wanted))
        left.remove(most)
        wanted -= values[most]
    return set(left) if len(left) * 2 >= len(cases) else set(cases) - set([*cases][::SHARE])
