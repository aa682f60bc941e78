"""Complex parameters, buffers and states of optimizers: trained, mixed, saved and resumed as pairs of real numbers."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import (
    AllReduce,
    Complete,
    DifferenceCompression,
    Elastic,
    Every,
    Float32,
    Gossip,
    GossipReplicas,
    Int8,
    OuterNesterov,
    PseudoGradient,
    QuasiGlobalMomentum,
    TopK,
    Travel,
)
from lightning_decentral.partial import Full
from lightning_decentral.pipeline import AverageGradients, Chain, Uniform, blocks_of
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import LobbyProcess
from tests.tiny import QUIET

STEPS, SAVED = 8, 5
TIMEOUT = timedelta(seconds=40)
SPARSE = TopK(fraction=0.3, block=8)
LOCAL = Every(2, Complete())


class Block(nn.Module):
    """Of complex numbers, or the same ones as pairs."""

    def __init__(self, pairs: bool, seed: int) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)
        weight, fixed = (0.4 * torch.randn(5, 2, 2, generator=numbers, dtype=torch.float64) for _ in range(2))
        level = torch.zeros(2, 2, dtype=torch.float64)
        made = [each if pairs else torch.view_as_complex(each) for each in (weight, fixed, level)]
        self.weight, self.fixed = nn.Parameter(made[0]), nn.Parameter(made[1], requires_grad=False)
        # Of another type: what is packed with it is the same in both.
        self.scale = nn.Parameter(torch.randn(2, generator=numbers))
        self.register_buffer("running_level", made[2])

    def forward(self, x: Tensor) -> Tensor:
        weight, fixed, level = (_complex(t) for t in (self.weight, self.fixed, self.running_level))
        hidden = x[:, :2].to(weight.dtype) @ weight.T[:, :2]
        if self.training:
            with torch.no_grad():
                level.mul_(0.5).add_(hidden.detach().mean(0), alpha=0.5)
        return torch.cat([(hidden * fixed[:2, 0]).abs() + self.scale * x[:, 2:], x[:, 2:]], 1)


def _complex(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_complex() else torch.view_as_complex(tensor)


class Waves(LightningModule):
    def __init__(self, pairs: bool, adam: bool) -> None:
        super().__init__()
        self.trunk, self.adam = nn.Sequential(Block(pairs, 1), Block(pairs, 2)), adam

    def forward(self, batch: Tensor) -> Tensor:
        return (self.trunk(batch)[:, :2] - 1).square().mean()

    def pipeline_stages(self) -> Chain:
        return Chain(self.trunk, blocks_of(list(self.trunk)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.adam:
            return torch.optim.AdamW(parameters, lr=0.02)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


class Rows:
    def __init__(self, worker: int) -> None:
        self._worker = worker

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(STEPS):
            numbers = torch.Generator().manual_seed(100 * self._worker + step)
            yield torch.randn(4, 4, generator=numbers, dtype=torch.float64)


def gossip(**given: Any) -> Callable[[], Any]:
    return lambda: GossipStrategy(timeout=TIMEOUT, **given)


def pipeline(**given: Any) -> Callable[[], Any]:
    return lambda: TokenPipelineStrategy(stages=2, slicing=Uniform(1), timeout=TIMEOUT, **given)


CASES: dict[str, tuple[int, Callable[[], Any]]] = {
    "gossip": (2, gossip()),
    "states": (2, gossip(states={"momentum_buffer": Travel(codec=Int8())}, delay=0)),
    "momentum": (2, gossip(combine=QuasiGlobalMomentum())),
    "outer": (2, gossip(combine=OuterNesterov(), topology=LOCAL)),
    "sparse": (2, gossip(codec=DifferenceCompression(SPARSE), combine=Gossip(rate=0.2))),
    "differences": (2, gossip(codec=SPARSE, combine=PseudoGradient(lr=1.0, momentum=0.0), topology=LOCAL)),
    "island": (4, gossip(island=AllReduce(2))),
    "coded island": (4, gossip(island=AllReduce(2, codec=Int8()), codec=Int8())),
    "compressed": (2, lambda: CompressedStrategy(codec=SPARSE, timeout=TIMEOUT)),
    "partial": (2, lambda: PartialBackpropStrategy(depth=Full(), cuts=["trunk.1"], timeout=TIMEOUT)),
    "pipeline": (2, pipeline()),
    "pipelines": (4, pipeline(replicas=AverageGradients(codec=SPARSE))),
    "drifting pipelines": (4, pipeline(replicas=GossipReplicas())),
    "spilled": (1, lambda: SpilledStrategy(memory_bytes=10**7, blocks=["trunk.0", "trunk.1"])),
}


def numbers(module: nn.Module) -> dict[str, Tensor]:
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    return {n: (torch.view_as_real(t) if t.is_complex() else t).clone() for n, t in state.items()}


def fits(name: str, adam: bool, folder: Path) -> list[dict[str, Tensor]]:
    """[of complex numbers, of pairs], each also as it goes on from a file."""
    size, make = CASES[name]
    rank = int(os.environ["LOCAL_RANK"])
    found = []
    for pairs in (False, True):
        saved = ModelCheckpoint(folder, f"{pairs}", every_n_train_steps=SAVED, save_top_k=-1)
        ends: dict[str, Tensor] = {}
        for start in (None, folder / f"{pairs}.ckpt")[: 1 if name == "spilled" else 2]:
            given = {**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False}
            callbacks = [saved] if start is None else []
            trainer = Trainer(**given, devices=size, max_epochs=1, strategy=make(), callbacks=callbacks)
            module = Waves(pairs, adam)
            trainer.fit(module, Rows(rank // 2 if "pipeline" in name else rank), ckpt_path=start)
            ends |= {f"{start is None} {key}": tensor for key, tensor in numbers(module).items()}
        found.append(ends)
    return found


def compared(found: list[dict[str, Tensor]]) -> None:
    complex_ones, pairs = found
    begun = numbers(Waves(True, False))
    assert not torch.allclose(complex_ones["True trunk.0.weight"], begun["trunk.0.weight"], atol=1e-3)
    for name, tensor in complex_ones.items():
        torch.testing.assert_close(tensor, pairs[name], rtol=1e-6, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("case", [*CASES, *(f"{name} by AdamW" for name in CASES if name != "states")])
def test_complex_numbers_are_trained_as_pairs(case: str, tmp_path: Path) -> None:
    name, _, adam = case.partition(" by ")
    for outcome in crew(CASES[name][0], fits, name, bool(adam), tmp_path):
        assert outcome.value is not None, outcome.error
        compared(outcome.value)


def fit_elastic(lobbies: tuple[str, str]) -> list[dict[str, Tensor]]:
    # By a codec whose rounding doesn't depend on who came first.
    rank, found = by_itself(), []
    for pairs, lobby in enumerate(lobbies):
        elastic = Elastic(lobby=lobby, workers=(2, 2), dead_after=8.0, host="127.0.0.1")
        given = {**QUIET, "use_distributed_sampler": False}
        trainer = Trainer(**given, devices=1, max_epochs=1, strategy=gossip(elastic=elastic, codec=Float32())())
        module = Waves(bool(pairs), False)
        trainer.fit(module, Rows(rank))
        found.append({f"True {key}": tensor for key, tensor in numbers(module).items()})
    return found


def test_so_they_are_where_workers_come_and_go() -> None:
    with LobbyProcess(least=2, most=2) as first, LobbyProcess(least=2, most=2) as second:
        for outcome in crew(2, fit_elastic, (first.place, second.place)):
            assert outcome.value is not None, outcome.error
            compared(outcome.value)
