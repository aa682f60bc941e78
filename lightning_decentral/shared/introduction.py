"""Lines printed when training with several workers starts: the strategy's settings; optimizers better than Adam."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import log2
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_decentral.shared.compute.codec.codec import Codec

if TYPE_CHECKING:
    from lightning_decentral.shared.plan.known_losses import KnownLosses

MUON, ACCUM = "gossip, int8, Muon", "gossip, int8, AccumAdamW"  # methods of `known_losses`
LONGEST_WINDOW = 8  # Steps that the source of AccumAdam averages at 16 and 32 workers.
USUAL_DECAY = 0.01  # default weight decay of AccumAdamW


class StartTable(Callback, ABC):
    """Callback that shows all settings of a run when it starts; the strategy then prints no lines."""

    @abstractmethod
    def shows(self, strategy: Any) -> bool:
        """Return whether this callback shows the settings of a run under this strategy."""


def introduce(lines: Sequence[str], trainer: Trainer) -> None:
    """Print the lines on worker 0, unless a callback of this Trainer has shown the settings as a table."""
    if not any(isinstance(c, StartTable) and c.shows(trainer.strategy) for c in trainer.callbacks):  # type: ignore[attr-defined]
        show(lines)


def show(lines: Sequence[str]) -> None:
    """Print the lines that aren't empty on worker 0."""
    for line in filter(None, lines):
        rank_zero_info(line)


def coded_bytes(codec: Codec, tensors: Iterable[Tensor]) -> int:
    """Return the bytes of one encoded message with all elements of these tensors."""
    # A complex number is sent as its two parts.
    return sum(codec.bytes(t.numel() * (1 + t.is_complex()), t.dtype.to_real()) for t in tensors)


def traffic(sent_bytes: float, model_bytes: float, size: int) -> str:
    """Text with the bytes that a worker sends in a step, and the bytes of an all-reduce of all gradients."""
    # For a single worker neither this nor the table below is read.
    from lightning_decentral.shared.plan.units import shown_bytes

    return f"{shown_bytes(sent_bytes)} a worker and step (all-reduce: {shown_bytes(of_all_reduce(model_bytes, size))})"


def of_all_reduce(sent_bytes: float, size: int) -> float:
    """Return the bytes that each of n workers sends in an all-reduce of `sent_bytes`: 2 (n - 1) / n times as many."""
    return 2 * (size - 1) / size * sent_bytes


def adam_hint(optimizers: Sequence[Optimizer], workers: int, module: nn.Module | None = None) -> str:
    """Name optimizers to use instead of Adam, whose steps are shorter where each worker updates by its own gradient.

    The shapes of the module's parameters tell what it resembles; without a module it is a model with attention. Returns
    code with the settings in use, of Muon alone where groups differ in weight decay, and for each kind of model where
    the module doesn't tell; names alone with several optimizers, or groups that differ in more; "" without Adam or with
    one worker."""
    adams = sorted({type(one).__name__ for one in optimizers if isinstance(one, (Adam, AdamW))})
    if not adams or workers < 2:
        return ""
    from lightning_decentral.shared.plan.known_losses import RECIPES, known_losses

    nearest = sorted(known_losses(), key=lambda one: abs(log2(one.workers / workers)))
    known = {name: next(one for one in nearest if one.kind == RECIPES[name]) for name in _resembled(module)}
    settings = {_settings(group) for optimizer in optimizers for group in optimizer.param_groups}
    scheduled = "keep your scheduler; give this rate to a callback that sets rates"
    start = f"{' or '.join(adams)} takes smaller steps here than under ddp. In its place ({scheduled})"
    one_rate = len({one[:-1] for one in settings}) == 1  # but for decay, which Muon's groups set by themselves
    if len(optimizers) > 1 or not (one_rate if "gpt" in known else len(settings) == 1):
        measured = any(ACCUM in one.batches for one in known.values())
        names = " or ".join(name for name, fits in (("Muon", "gpt" in known), ("AccumAdamW", measured)) if fits)
        return f"{start}: {names} of lightning_decentral.optim, see docs/optimizers.md"
    setting = next(iter(settings)) if len(settings) == 1 else None
    ways = [_way(recipe, one, setting, workers, alone=len(known) == 1) for recipe, one in known.items()]
    either = f"with attention or embeddings {ways[0]}; without {ways[1]}" if ways[1:] else ways[0]
    return f"{start}, from lightning_decentral.optim: {either}. More: docs/optimizers.md"


def _resembled(module: nn.Module | None) -> Sequence[str]:
    """Return the recipes whose measured optimizers suit a module: both where its parameters don't tell which."""
    if module is None:
        return ("gpt",)
    embeds = any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in module.modules())
    # Matrices without embeddings may be those of a perceptron, or attend to patches of images.
    convolves = sum(p.numel() * (1 if p.ndim > 2 else -1) for p in module.parameters() if p.ndim > 1) > 0
    return ("gpt", "resnet") if embeds == convolves else ("gpt",) if embeds else ("resnet",)


def _way(recipe: str, known: "KnownLosses", setting: tuple[float, ...] | None, workers: int, alone: bool) -> str:
    """Code for a model like a recipe's, with what is known of it. `setting`: of all groups, None where they differ."""
    from lightning_decentral.shared.plan.known_losses import overrides_of

    where = f"{known.kind} on {known.workers} workers"
    if recipe == "resnet":
        code = f"`{_accum_code(setting, workers, of_rate=1.0)}`" if setting else "AccumAdamW"
        return f"{code} ({where}: {_reached(known.share(ACCUM))}; small networks: in as many)"
    muon = (
        f"`Muon(muon_groups(self), lr=2e-2, momentum=0.9)`, in recipes {overrides_of(MUON)} "
        f"({_reached(known.share(MUON))}; {where})"
    )
    if not (alone and setting and ACCUM in known.batches):
        return muon
    accum = _accum_code(setting, workers, of_rate=0.5)
    return f"{muon}; or `{accum}`, in recipes {overrides_of(ACCUM)} ({_reached(known.share(ACCUM))})"


def _accum_code(settings: tuple[float, ...], workers: int, of_rate: float) -> str:
    """Return code that constructs AccumAdamW with Adam's settings, at this share of Adam's learning rate."""
    (rate, *betas, decay), window = settings, min(workers, LONGEST_WINDOW)
    remembered = ", ".join(f"{beta**window:.3g}" for beta in betas)
    kept = "" if decay == USUAL_DECAY else f", weight_decay={decay:g}"
    return f"AccumAdamW(self.parameters(), lr={rate * of_rate:g}, betas=({remembered}), window={window}{kept})"


def _settings(group: dict[str, Any]) -> tuple[float, ...]:
    """Return learning rate (before a scheduler changed it), betas and weight decay."""
    rate = group.get("max_lr", group.get("initial_lr", group["lr"]))
    return tuple(float(one) for one in (rate, *group.get("betas", ()), group.get("weight_decay", 0.0)))


def _reached(share: float | None) -> str:
    return f"ddp's loss in {share:.2f} of its steps" if share else "not ddp's loss in as many steps"
