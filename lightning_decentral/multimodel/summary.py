"""A plan of shards in words."""

from lightning_decentral.multimodel.shards import Plan

STATES = 2  # tensors of an optimizer's state for each parameter, as Adam has them


def summary(plan: Plan, budget_bytes: int | None) -> dict[str, str]:
    """What a user wants to know when training begins, line by line."""
    footprint = plan.footprint
    names = [[footprint.blocks[block].name for block in blocks] for blocks in plan.shards]
    lines = {
        "shards": f"{len(plan.shards)} of {len(footprint.order)} blocks, parameters {size(footprint.parameter_bytes)}",
        **{
            f"shard {i}": f"{_span(blocks)}, {size(shard_bytes)}"
            for i, (blocks, shard_bytes) in enumerate(zip(names, plan.shard_bytes, strict=True))
        },
        "peak": f"{size(plan.peak_bytes)} on the device, predicted, of {_limit(budget_bytes)}",
        "seconds": f"{plan.seconds:.3g} a step, predicted, without the update; {_lost(plan):.3g} of them lost to "
        "loading and to computing forwards twice",
    }
    if fits(plan, budget_bytes):
        lines["advice"] = "the model fits: use the plain strategy"
    return lines


def fits(plan: Plan, budget_bytes: int | None) -> bool:
    """Whether everything would fit at once, with an optimizer's state like Adam's."""
    needed = plan.footprint.plain_bytes + STATES * plan.footprint.parameter_bytes
    return budget_bytes is None or needed <= budget_bytes


def size(number_bytes: float) -> str:
    """In MiB."""
    return f"{number_bytes / 2**20:.4g} MiB"


def _limit(budget_bytes: int | None) -> str:
    return "no limit" if budget_bytes is None else size(budget_bytes)


def _lost(plan: Plan) -> float:
    return max(0.0, plan.seconds - plan.footprint.plain_seconds)


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} blocks)"
