"""Search for cuts in a network: from `"auto"`, `"blocks"`, a number or names to boundaries verified on a copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_decentral.partial.compute.cut import Judged, Verdict
from lightning_decentral.partial.compute.trial import Decide, Trial, by_itself, trial_copy, untouched
from lightning_decentral.partial.plan.cost import Balance
from lightning_decentral.shared.compute.block_cost import Run, parameter_bytes
from lightning_decentral.shared.compute.modules import BlockSequence, candidates, uncompiled
from lightning_decentral.shared.plan.linear_partition import balanced_partition
from lightning_decentral.shared.plan.profile import BlockCost

Cuts = str | int | Sequence[str]
AUTO_SEGMENTS = 4


@dataclass(frozen=True)
class CutPlan:
    """Verified boundaries and, for every parameter, its segment, from the bottom.

    A tied parameter belongs to the highest segment that uses it, one without a gradient to the highest of all.
    Without a boundary there is one segment: a model of one layer."""

    boundaries: tuple[str, ...]
    segment_of: dict[str, int]
    costs: tuple[BlockCost, ...]
    judged: tuple[Judged, ...]
    chain: BlockSequence | None = None

    @property
    def segments(self) -> int:
        return len(self.boundaries) + 1

    def lowest_use(self, segment: int) -> int:
        """Lowest segment that uses a parameter of this segment; a tied one may be used far below."""
        tied = [
            sum(judged.verdicts[name] is Verdict.ABOVE for judged in self.judged)
            for name, own in self.segment_of.items()
            if own == segment and any(judged.verdicts[name] is Verdict.TIED for judged in self.judged)
        ]
        return min([segment, *tied])


def check_wish(cuts: Cuts) -> None:
    """Raise ValueError for a `cuts` option that is impossible for any module."""
    match cuts:
        case "auto" | "blocks":
            return
        case bool() | str():  # before the test for int, as True is an int, too
            raise ValueError(f"cuts must be 'auto', 'blocks', a number of cuts, or names of modules, got {cuts!r}")
        case int() if cuts < 1:
            raise ValueError(f"cuts must be at least 1, got {cuts}: without a cut use the ddp strategy")
        case int():
            return
    if not cuts or len(set(cuts)) < len(cuts):
        raise ValueError(f"cuts must name one or more distinct modules, got {list(cuts)}")


def search(
    module: nn.Module,
    cuts: Cuts,
    balance: Balance,
    run_of: Callable[[nn.Module], Run],  # copy -> function to its loss on a small batch, the same each time
    decide: Decide = by_itself,  # agrees with other workers, which all search alike and in the same order
) -> CutPlan:
    """Find and verify cuts of `module`; all runs use a copy, and nothing of the module changes. ValueError: an unknown
    name, more cuts than blocks, a cut that fails the verification, no chain of blocks; a copy that computes with
    parameters of the module itself."""
    check_wish(cuts)
    copied = trial_copy(module)
    with uncompiled(), untouched(module):
        trial, chains = Trial(copied, run_of(copied), decide), _likeliest(module)
        match cuts:
            case "blocks":
                return _between_all(trial, chains)
            case int() | str():
                return _along_a_chain(trial, chains, None if isinstance(cuts, str) else cuts, balance)
        unknown = [name for name in cuts if name not in dict(copied.named_modules()) or not name]
        if unknown:
            names = [name for chain in candidates(copied)[:1] for name in chain.names]
            some = f"there are {', '.join(names[:4])}, ..." if names else "the module has no chain of blocks"
            raise ValueError(f"no module named {unknown[0]!r} to cut at: {some}")
        return plan(trial, list(cuts))


def _likeliest(module: nn.Module) -> list[BlockSequence]:
    """Order chains with trained parameters before frozen ones: a teacher may look like its student."""
    modules = dict(module.named_modules())
    return sorted(
        candidates(module),
        key=lambda chain: not any(p.requires_grad for name in chain.names for p in modules[name].parameters()),
    )


def _along_a_chain(trial: Trial, chains: Sequence[BlockSequence], number: int | None, balance: Balance) -> CutPlan:
    trial.try_out()  # raises here if the step itself fails, whatever the cuts
    layers = [part for part in trial.module.modules() if any(True for _ in part.parameters(recurse=False))]
    if number is None and len(layers) < 2:  # nothing to cut
        costs = trial.measure([], [parameter_bytes(trial.module.parameters())])
        return CutPlan((), {name: 0 for name, _ in trial.module.named_parameters()}, costs, ())
    reasons = []
    for chain in chains:
        try:
            return _cut_chain(trial, chain, number, balance)
        except TooFewBlocks:  # this chain can be cut, only less often: no reason to try another
            raise
        except ValueError as error:
            reasons.append(f"{chain}: {error}")
    tried = "; ".join(reasons[:3]) or "no Sequential or ModuleList holds two modules of one class with parameters"
    raise ValueError(f"no chain of blocks to cut in {trial.name} ({tried}): give cuts=[names] yourself")


class TooFewBlocks(ValueError):
    """Error: more cuts than the chain of blocks has places for."""


def _cut_chain(trial: Trial, chain: BlockSequence, number: int | None, balance: Balance) -> CutPlan:
    """Cut into balanced pieces; the first includes what comes before the chain, the last what comes after."""
    pieces = min(AUTO_SEGMENTS, len(chain.names)) if number is None else number + 1
    sizes = [parameter_bytes(trial.module.get_submodule(name).parameters()) for name in chain.names]
    costs = trial.measure(chain.names[1:], sizes)
    if pieces > len(costs):
        plan(trial, list(chain.names[1:2]))  # raises first if the chain can't be cut at all
        raise TooFewBlocks(f"{number} cuts need {pieces} blocks, there are {len(costs)} ({chain}): give fewer cuts")
    _, *starts, _ = balanced_partition([balance.of(cost) for cost in costs], pieces)
    return replace(plan(trial, [chain.names[start] for start in starts]), chain=chain)


def plan(trial: Trial, boundaries: list[str]) -> CutPlan:
    """Verify these boundaries and sort the parameters into segments; ValueError for an invalid cut."""
    judged = trial.judge(boundaries)
    for verdicts in judged:
        verdicts.refuse()
    named = dict(trial.module.named_parameters())
    # Counts boundaries below the parameter. Tied and unused ones count as above: what they contribute later is averaged
    # over all contributors of the segment above, for unused ones of the loss, which is exact.
    segment_of = {n: sum(each.verdicts[n] is not Verdict.BELOW for each in judged) for n in named}
    members = [[p for n, p in named.items() if segment_of[n] == s] for s in range(len(boundaries) + 1)]
    costs = trial.measure(boundaries, [parameter_bytes(m) for m in members])
    return CutPlan(tuple(boundaries), segment_of, costs, tuple(judged))


def joints(module: nn.Module, run_of: Callable[[nn.Module], Run]) -> tuple[str, ...]:
    """Modules at whose inputs the network may be cut: every block of the likeliest chain that can be cut between all
    blocks, and the first module after it. Empty if there is no such chain. `run_of`: maps a copy of the module to a
    function that returns its loss on a small batch, the same each time."""
    copied = trial_copy(module)
    with uncompiled():
        return _joints(Trial(copied, run_of(copied)), _likeliest(module))


def _between_all(trial: Trial, chains: Sequence[BlockSequence]) -> CutPlan:
    names = _joints(trial, chains)
    if not names:
        raise ValueError(f"no chain of blocks to cut in {trial.name} between all blocks: give cuts=[names]")
    found = plan(trial, list(names))
    # Embeddings that are the head's weight, too, belong to the head: they form no segment of their own.
    filled = [name for j, name in enumerate(names) if j in found.segment_of.values()]
    return found if len(filled) == len(names) else plan(trial, filled)


def _joints(trial: Trial, chains: Sequence[BlockSequence]) -> tuple[str, ...]:
    entered = trial.entered()
    for chain in chains:
        if set(chain.names) <= set(entered) and _comes_apart(trial, chain.names[1:]):
            first, *inner = chain.names
            last = chain.names[-1]
            later = [n for n in entered[entered.index(last) + 1 :] if not n.startswith(f"{last}.")]
            behind = next((n for n in later[:2] if _comes_apart(trial, [n])), None)  # each costs a verification
            before = [first] if _comes_apart(trial, [first]) else []
            return (*before, *inner, *([behind] if behind else []))
    return ()


def _comes_apart(trial: Trial, names: Sequence[str]) -> bool:
    try:
        for verdicts in trial.judge(names):
            verdicts.refuse()
    except ValueError:
        return False
    return True
