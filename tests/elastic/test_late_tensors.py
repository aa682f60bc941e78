"""What comes while elastic workers train: alike on all it is trained, as one worker would; else it is refused by name,
whoever made it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.elastic.late_tensors import LateTensors
from lightning_decentral.gossip import Complete, Elastic
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import LobbyProcess
from tests.tiny import QUIET


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.kept


def own_buffer(layer: nn.Module, mask: Tensor) -> None:
    layer.register_buffer("sparse", mask)


def frozen_parameter(layer: nn.Module, mask: Tensor) -> None:
    layer.sparse = nn.Parameter(mask, requires_grad=False)


def part(layer: nn.Module, mask: Tensor) -> None:
    layer.add_module("masked", Masked(mask))


def again(layer: nn.Module, mask: Tensor) -> None:
    prune.custom_from_mask(layer, "weight", mask)
    prune.custom_from_mask(layer, "weight", mask.roll(1))


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "custom": lambda layer, mask: prune.custom_from_mask(layer, "weight", mask),
    "parametrization": lambda layer, mask: parametrize.register_parametrization(layer, "weight", Masked(mask)),
    "own buffer": own_buffer,
    "boolean": lambda layer, mask: own_buffer(layer, mask.bool()),
    "of the bias": lambda layer, mask: prune.custom_from_mask(layer, "bias", mask[0]),
    "frozen parameter": frozen_parameter,
    "part": part,
    "again": again,
}
# Of a worker's own numbers, where a test gives it a weight; the mask that is handed over isn't asked for.
OWN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "one": lambda layer, _: prune.l1_unstructured(layer, "weight", 0.5),
    "global": lambda layer, _: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.5),
    "rows": lambda layer, _: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "drawn": lambda layer, _: prune.random_unstructured(layer, "weight", 0.5),
}
EYE, OTHER = torch.eye(4), torch.eye(4).roll(1, 0)


@contextmanager
def two_members(before: Callable[[nn.Module], Any] = lambda _: None) -> Iterator[list[Any]]:
    """[(module, its watch), ...] of members of unlike weights."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 4))
        before(module[0])
        made.append((module, LateTensors(module)))
    try:
        yield made
    finally:
        for _, late in made:
            late.close()


def asked(members: Sequence[tuple[nn.Module, LateTensors]], there: int = 2) -> list[str]:
    """What each is told; "" of one that doesn't ask."""
    rows: list[Any] = []
    lobby_client = SimpleNamespace(state=SimpleNamespace(times=SimpleNamespace(dead_after=0.01)))

    def told(late: LateTensors, answer: Callable[[Any, Any], Any]) -> str:
        member: Any = SimpleNamespace(
            together=answer, present=lambda: ["w"] * there, worker=SimpleNamespace(lobby_client=lobby_client)
        )
        try:
            late.check(member)
        except RuntimeError as error:
            return str(error)
        return ""

    def collected(row: Any, made: Any) -> str:
        rows.append((row, made))
        return ""

    for _, late in members:
        told(late, collected)
        late._news = True
    found = []
    for (_, late), (_, made) in zip(members, rows, strict=True):
        late._agreed = {}
        found.append(told(late, lambda *_, made=made: made([each for each, _ in rows])))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_one_content_are_taken_and_others_named(way: str) -> None:
    for masks, wanted in (((EYE, EYE), False), ((EYE, OTHER), True)):
        with two_members() as members:
            for (module, _), mask in zip(members, masks, strict=True):
                WAYS[way](module[0], mask.clone())
            told = asked(members)
            assert len(told) == 2
            assert [bool(text) for text in told] == [wanted] * 2
            for text in told:
                assert (
                    not text
                    or "was registered during training: register it on all elastic workers in the same step" in text
                )


@pytest.mark.parametrize("way", OWN)
def test_every_way_of_torchs_that_looks_at_own_numbers_is_named(way: str) -> None:
    with two_members() as members:
        for module, _ in members:
            OWN[way](module[0], EYE)
        assert all("0.weight_mask was registered during training" in text for text in asked(members))


def test_a_mask_from_before_may_be_replaced_alike() -> None:
    for masks, wanted in (((EYE, EYE), ["", ""]), ((EYE, OTHER), None)):
        with two_members(lambda layer: prune.custom_from_mask(layer, "weight", torch.ones(4, 4))) as members:
            for (module, _), mask in zip(members, masks, strict=True):
                prune.custom_from_mask(module[0], "weight", mask)
            told = asked(members)
            assert told == wanted if wanted else all("0.weight_mask was registered" in text for text in told)


def test_one_alone_is_told_so_and_a_statistic_is_no_news() -> None:
    with two_members() as members:
        prune.custom_from_mask(members[0][0][0], "weight", EYE)
        (text,) = asked(members[:1])
        assert text.endswith("only this worker registered it")
    with two_members(lambda layer: layer.register_buffer("level", torch.zeros(3))) as members:
        module, late = members[0]
        module[0].level = module[0].level + 1
        WAYS["custom"](nn.Linear(4, 4), EYE)  # of another model
        assert not late._news


class Pruned(LightningModule):
    """Each worker has its own gradients, and prunes in its third step, by its own weights or as is said."""

    def __init__(self, mask: str, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layer, self.mask, self.rank = nn.Linear(4, 4), mask, rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step != 2:
            return
        mask = (self.layer.weight + (self.rank + 1) * torch.eye(4).roll(self.rank, 0)).detach() > 0.2
        if self.mask == "shared":
            strategy: Any = self.trainer.strategy
            mask = strategy.broadcast(mask)
        prune.custom_from_mask(self.layer, "weight", mask.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 4)).sum() * (1 + self.rank)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(lobby: str, mask: str) -> dict[str, Tensor]:
    rank = by_itself()
    elastic = Elastic(lobby=lobby, workers=(2, 2), dead_after=5.0, host="127.0.0.1")
    strategy = GossipStrategy(elastic=elastic, topology=Complete(), delay=0, timeout=timedelta(seconds=60))
    given = {**QUIET, "use_distributed_sampler": False}
    trainer = Trainer(**given, max_steps=6, devices=1, strategy=strategy)
    module = Pruned(mask, rank)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(6, 1))))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_the_oldests_mask_on_all_is_trained_as_one_worker_would() -> None:
    with LobbyProcess(least=2, most=2) as lobby:
        first, second = (outcome.value for outcome in crew(2, fit, lobby.place, "shared"))
    mask = first["layer.weight_mask"]
    assert 0 < mask.sum() < mask.numel()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Both have begun with the oldest's, and the mean of their gradients is 3/2 in each step.
    starts = [Pruned("", rank).layer for rank in range(2)]
    begun = next(start for start in starts if torch.allclose(first["layer.bias"], start.bias - 6 * 0.15))
    assert torch.allclose(first["layer.weight_orig"], begun.weight - 0.15 * (2 + 4 * mask))


def test_masks_of_the_workers_own_end_them_by_name() -> None:
    with LobbyProcess(least=2, most=2) as lobby:
        for outcome in crew(2, fit, lobby.place, "own"):
            assert "RuntimeError: layer.weight" in outcome.error
            assert "it differs among the members" in outcome.error


class Lonely(Pruned):
    """Worker 0 prunes by itself once there are two, and the other goes on until it is alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        members = len(strategy.members)
        self.most = max(members, getattr(self, "most", 0))
        if members == 2 and not self.rank and not prune.is_pruned(self.layer):
            prune.custom_from_mask(self.layer, "weight", EYE)
        self.trainer.should_stop = members < self.most


def fit_lonely(lobby: str, delay: int) -> int:
    rank = by_itself()
    elastic = Elastic(lobby=lobby, workers=(1, 2), dead_after=5.0, host="127.0.0.1")
    strategy = GossipStrategy(elastic=elastic, topology=Complete(), delay=delay, timeout=timedelta(seconds=60))
    trainer = Trainer(**{**QUIET, "use_distributed_sampler": False}, max_epochs=-1, devices=1, strategy=strategy)
    module = Lonely("", rank)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(6, 1))))
    return module.most


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
def test_who_prunes_alone_ends_by_name_and_the_other_goes_on(delay: int) -> None:
    with LobbyProcess(least=1, most=2) as lobby:
        pruner, other = crew(2, fit_lonely, lobby.place, delay)
    assert "RuntimeError: layer.weight" in pruner.error
    assert "only this worker registered it" in pruner.error
    assert other.value == 2, other.error
