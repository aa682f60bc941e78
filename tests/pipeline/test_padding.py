"""A mask that hides nothing is none on a device, too, where no host could ask; any other stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.pipeline import Given
from lightning_decentral.pipeline.compute.causal.causal_model import CausalModel
from lightning_decentral.pipeline.compute.model import Call, hides_nothing, part_of, remember, tensors_in
from tests import simulated
from tests.pipeline.causal import VOCABULARY
from tests.pipeline.training import LENGTH, Language
from tests.simulated.trainers import Fitted, fit

pytestmark = pytest.mark.threads

PADDED = (False, True)
"""Of the batches, in order."""


class Text(Language):
    """The last token of the second batch's second row is padding."""

    def __init__(self) -> None:
        super().__init__("llama", batch=4, sgd=True)

    def _loader(self, count: int = 4 * len(PADDED)) -> DataLoader[Any]:
        ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(2))
        mask = torch.ones_like(ids)
        if count > 5:
            mask[5, -1] = 0
        return DataLoader(TensorDataset(ids, mask, ids.masked_fill(mask == 0, -100)), batch_size=4)


class Moving(Text):
    """Its own hook has the last word on the batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        ids, mask, labels = batch
        return ids, torch.cat([mask[:, :-1], torch.zeros_like(mask[:, :1])], -1), labels


class Hiding(Text):
    """Its step hides a token that wasn't."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[1][:, -1] = 0
        return super().training_step(batch, batch_idx)


def trained(module: Callable[[], LightningModule], there: bool, microbatches: int) -> tuple[Fitted, list[bool]]:
    """What came of it, and whether each call in training had a mask."""
    masked, read, model = list[bool](), CausalModel.read, module()
    options = {"stages": 1, "slicing": Given((5, 1, 4, 3)), "microbatches": microbatches}

    def reading(self: CausalModel, *args: Any) -> Call:
        call = read(self, *args)
        if self.module is model.model and self.module.training:  # not the small copy that is tried before
            masked.append(call.attention_mask is not None)
        return call

    with mock.patch.object(CausalModel, "read", reading):
        settings = {"max_steps": len(PADDED), "devices": 1, "log_every_n_steps": 100, "limit_val_batches": 1}
        found = fit(lambda: (TokenPipelineStrategy, options, model, ()), there, settings)
    return found, masked


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("module", "wanted", "microbatches"),
    [(Text, PADDED, 2), (Text, PADDED, 1), (Moving, (True, True), 1), (Hiding, (True, True), 2)],
    ids=["in micro-batches", "whole", "moved by its own hook", "changed by its step"],
)
def test_only_masks_that_hide_nothing_are_left_out(module: Any, wanted: tuple[bool, ...], microbatches: int) -> None:
    found, masked = trained(module, True, microbatches)
    assert masked == [one for one in wanted for _ in range(microbatches)], "each call is read once"
    expected, _ = trained(module, False, microbatches)
    assert [wait for wait in found.steps if wait.startswith("_local_scalar_dense")] == []
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-5, atol=1e-6)


ONES = torch.ones(4, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("before", "known"),
    [
        (ONES, True),
        (ONES.bool(), True),
        (2 * ONES, False),  # numbers of documents, say
        (ONES.double(), False),
        (ONES.flatten(), False),
        (ONES.tril(), False),
    ],
    ids=["ones", "true", "twos", "numbers", "a row", "zeros, too"],
)
def test_ones_are_remembered_where_they_went(before: Tensor, known: bool) -> None:
    with simulated.device(seed=0):
        there, other = before.to("cuda"), before.to("cuda")
        remember([before], [there])
        assert hides_nothing(there) is hides_nothing(part_of(there, 2, 1)) is known
        assert not hides_nothing(other)


def test_what_the_host_cannot_vouch_for_is_not_remembered() -> None:
    with simulated.device(seed=0):
        moved = ONES.clone()
        remember([ONES], [moved])
        assert not hides_nothing(moved), "a mask of the host: the model asks itself"
        there = ONES.to("cuda")
        remember([ONES[:2]], [there])
        remember([ONES, ONES], [there])
        assert not hides_nothing(there), "not what it became"
        with torch.inference_mode():
            unversioned = ONES.to("cuda")
        remember([ONES], [unversioned])
        assert not hides_nothing(unversioned)


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    others: dict[str, Any]


def test_tensors_are_found_without_making_the_batch_anew() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in tensors_in([Batch(a, {"more": (b, "word", None)}), c])] == [1, 2, 3]
