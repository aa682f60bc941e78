"""Findings of the first batch, as text: where the network is cut, and what each depth or selection costs."""

from collections.abc import Iterator

from lightning_decentral.partial.plan.cost import memory_fraction, selected_fraction
from lightning_decentral.partial.plan.depth import DepthAssignment, top
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.shared.plan.profile import BlockCost

STEPS = 10_000  # looked at, to find what the assignment ever trains; it may be long before it changes
ROWS = 8


def described(driver: DepthController, network: str) -> str:
    """The cuts, and what each depth or selection costs, in a few lines."""
    plan = driver.plan
    if not plan.boundaries:
        return f"partial backprop trains {network} in full: it has one layer, nothing to cut"
    chain = f" of {plan.chain}" if plan.chain else ""
    lines = [
        f"partial backprop, {driver.assignment}: {plan.segments} segments{chain}",
        f"  cut before {', '.join(plan.boundaries)}",
        *_rows(driver),
    ]
    return "\n".join(lines)


def _rows(driver: DepthController) -> Iterator[str]:
    kinds = _kinds(driver.assignment, driver.place.size, driver.plan.segments)
    for own in kinds[:ROWS]:
        yield _row(own, driver.lowest(own), driver.plan.costs)
    if len(kinds) > ROWS:
        yield f"  and {len(kinds) - ROWS} more"


def _row(own: tuple[int, ...], lowest: int, costs: tuple[BlockCost, ...]) -> str:
    depth = len(costs) - lowest
    sizes = [cost.parameter_bytes for cost in costs]
    passing = own != top(depth, len(costs))
    what = f"segment{'s' * (len(own) > 1)} {', '.join(map(str, own))}" if passing else f"depth {depth} of {len(costs)}"
    # What passed segments keep depends on their layers: a matrix needs nothing to pass a gradient on.
    most = "at most " if passing else ""
    return (
        f"  {what}: compute {selected_fraction(costs, own, lowest):.2f}, saved activations {most}"
        f"{memory_fraction(costs, depth):.2f}, gradients {sum(sizes[s] for s in own) / max(1, sum(sizes)):.2f} of full"
    )


def _kinds(assignment: DepthAssignment, size: int, segments: int) -> list[tuple[int, ...]]:
    """Selections of segments that some worker trains at some step, the largest first."""
    steps = _steps(int(assignment.warm_up))
    found = {assignment.trained(rank, size, step, segments) for step in steps for rank in range(size)}
    return sorted(found, key=lambda own: (-len(own), own))


def _steps(warm_up: int) -> list[int]:
    """Steps to look at: of the warm-up its first; then densely at first and sparsely later."""
    later = range(100, STEPS, 97)
    return sorted({0, *(warm_up + step for step in (*range(100), *later))})
