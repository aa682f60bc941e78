"""Cost of training with Muon, from a profile made with Adam: matrix products, by the matrices' shapes, and memory.

    operations(short s, long l) = 5 (4 s^2 l + 2 s^3)            five times X X^T, its square, and (b A + c A^2) X
    update(block)  = its update with Adam + operations of its hidden matrices / the rate that the profile measured
    state          = hidden + 2 (parameters - hidden)            bytes: momentum_buffer; exp_avg and exp_avg_sq
    while stepping = hidden + 5 min(hidden, max(64 MiB, the largest matrix)), at most

Muon's elementwise operations are assumed to take as long as Adam's.

Source: `optim.muon`, `optim.newton_schulz`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_decentral.shared.plan.profile import Model, Sides

STEPS = 5
CALL_BYTES = 64 * 2**20
ELEMENT_BYTES = 4
ALIKE = ("adam", "adamw")
ACCUMULATED = {"adam": "accum_adam", "adamw": "accum_adamw"}
"""{profiled optimizer: its AccumAdam form}, with equal seconds and a window's mean gradient in addition."""
MUON = "muon"


def operations(hidden: Iterable[Sides], steps: int = STEPS) -> int:
    """Operations of Newton-Schulz on these matrices; a product of [a, b] and [b, c] is 2 a b c."""
    return sum(steps * (4 * s**2 * long + 2 * s**3) for s, long in hidden)


def hidden_bytes(hidden: Iterable[Sides]) -> int:
    """Bytes of the hidden matrices in float32."""
    return sum(ELEMENT_BYTES * short * long for short, long in hidden)


def stepping_bytes(hidden: Sequence[Sides]) -> int:
    """Largest number of bytes that Muon needs during a step."""
    sizes = [hidden_bytes([sides]) for sides in hidden]
    return sum(sizes) + 5 * min(sum(sizes), max([CALL_BYTES, *sizes]))


def products_seconds(model: Model) -> float:
    """Seconds of Newton-Schulz on all hidden matrices; 0 if not measured."""
    return operations(model.hidden) / model.products_per_second if model.products_per_second else 0.0


def trained_with(model: Model, optimizer: str) -> Model:
    """Return the model with the costs of this optimizer, named as in `optimizer=`; its overrides name the optimizer.
    ValueError: the profile is of another optimizer, and it isn't Muon's cost that is derived from Adam's."""
    others = (one for one in model.words if not re.match(r"[+~]*optimizer\b", one))
    if optimizer == model.optimizer:
        return model
    named = replace(model, words=(*others, f"optimizer={optimizer}"), optimizer=optimizer)
    if {optimizer, model.optimizer} == {*ALIKE}:
        return named
    if optimizer == ACCUMULATED.get(model.optimizer):
        return replace(named, state_bytes=model.state_bytes + model.parameter_bytes)
    if optimizer != MUON or model.optimizer not in ALIKE or not model.products_per_second:
        raise ValueError(
            f"this profile, of {model.optimizer or 'an unnamed optimizer'}, doesn't show what {optimizer} costs: "
            f"profile again with optimizer={optimizer}"
        )
    hidden, whole, rate = hidden_bytes(model.hidden), model.parameter_bytes, model.products_per_second
    blocks = [replace(b, update_seconds=b.update_seconds + operations(b.hidden) / rate) for b in model.blocks]
    states = ("momentum_buffer", hidden), ("exp_avg", whole - hidden), ("exp_avg_sq", whole - hidden)
    return replace(
        named, blocks=tuple(blocks), state_bytes=2 * whole - hidden, states=states,
        stepping_bytes=stepping_bytes(model.hidden), whole_bytes=hidden,
    )  # fmt: skip
