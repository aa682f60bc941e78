"""All the places at which a network comes apart along its chain of blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_decentral.chain import candidates
from lightning_decentral.partial.search import trial_copy
from lightning_decentral.partial.verify import Run, judge


def joints(module: nn.Module, run_of: Callable[[nn.Module], Run]) -> tuple[str, ...]:
    """Modules at whose inputs the network may be cut: every block of the likeliest chain that comes apart between all
    of its blocks, and the first module behind it. Empty where there is no such chain.

    Args:
        run_of: from a copy of the module to a function that returns its loss on a small batch, the same each time.
    """
    trial = trial_copy(module)
    run = run_of(trial)
    entered = _entered(trial, run)
    for chain in candidates(trial):
        if set(chain.names) <= set(entered) and _comes_apart(trial, chain.names[1:], run):
            first, *inner = chain.names
            behind = next((n for n in _after(entered, chain.names[-1]) if _comes_apart(trial, [n], run)), None)
            before = [first] if _comes_apart(trial, [first], run) else []
            return (*before, *inner, *([behind] if behind else []))
    return ()


def _comes_apart(trial: nn.Module, names: Sequence[str], run: Run) -> bool:
    try:
        for verdicts in judge(trial, list(names), run):
            verdicts.refuse()
    except ValueError:
        return False
    return True


def _entered(trial: nn.Module, run: Run) -> list[str]:
    """Modules in the order in which a forward enters them, but for those entered twice."""
    names: list[str] = []

    def enter(name: str, *_: Any) -> None:
        names.append(name)

    hooks = [m.register_forward_pre_hook(partial(enter, name)) for name, m in trial.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in names if names.count(name) == 1]


def _after(entered: Sequence[str], last: str) -> list[str]:
    """What is entered behind `last` and isn't a part of it; the likeliest few, each costs a verification."""
    later = entered[entered.index(last) + 1 :]
    return [name for name in later if not name.startswith(f"{last}.")][:2]
