"""What changes while stages train: parts frozen and thawed, pruned, laid out otherwise, buffers; as in one process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from tests.crew import crew
from tests.pipeline.causal import VOCABULARY, token_mean
from tests.pipeline.compute.test_adapters import Images
from tests.pipeline.training import Language, alone, distance, fit, forked, pipeline
from tests.tiny import QUIET

SHORT: dict[str, Any] = {"max_steps": 5, "limit_val_batches": 0, "gradient_clip_val": 0.3}


class Changing(Language):
    """With a parameter beside the model. What `within` and `before` do is done in and before the step with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64))
        self.before: dict[int, Callable[[Any], Any]] = {}
        self.within: dict[int, Callable[[Any], Any]] = {}
        self.behind: dict[int, Callable[[Any], Any]] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.get(self.trainer.global_step, bool)(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch
        self.within.get(self.trainer.global_step, bool)(self)
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        self.behind.get(self.trainer.global_step, bool)(self)
        return token_mean(self.scale * logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def trains(self, part: str, trained: bool) -> None:
        for name, parameter in self.named_parameters():
            if part in name:
                parameter.requires_grad_(trained)

    def linear(self) -> list[nn.Module]:
        return [part for name, part in self.named_modules() if name.endswith("mlp.c_fc")]


def tied(module: Changing, trained: bool) -> None:
    module.trains("wte", trained)
    module.trains("lm_head", trained)


def pruned_for_good(module: Changing) -> None:
    for part in module.linear():
        prune.l1_unstructured(part, "weight", 0.5)
        prune.remove(part, "weight")


def frozen_at_first() -> Changing:
    module = Changing()
    module.trains("scale", False)
    module.trains("h.0", False)
    tied(module, False)
    module.before = {1: lambda own: tied(own, True), 2: lambda own: own.trains("h.0", True), 4: pruned_for_good}
    module.within = {2: lambda own: own.trains("scale", True), 3: lambda own: own.trains("h.1", False)}
    return module


def test_what_is_thawed_frozen_and_pruned_for_good_is_trained_as_in_one_process(tmp_path: Path) -> None:
    wanted, losses, _ = fit(frozen_at_first(), alone(), tmp_path / "alone", **SHORT)
    found, found_losses, _ = forked(frozen_at_first(), pipeline(2), tmp_path / "pipeline", **SHORT)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert distance(found, wanted) < 1e-9


class Relaid(Images):
    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__("resnet")
        self.places = places

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank in self.places:
            self.to(memory_format=torch.channels_last)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("places", [(0, 1), (1,)], ids=str)
def test_a_layout_that_changes_on_some_stages_changes_no_number(tmp_path: Path, places: tuple[int, ...]) -> None:
    wanted, losses, _ = fit(Relaid(()), alone(), tmp_path / "alone", max_steps=3, limit_val_batches=0)
    how = pipeline(2, slicing=None)
    found, found_losses, _ = forked(Relaid(places), how, tmp_path / "p", max_steps=3, limit_val_batches=0)
    assert found_losses == pytest.approx(losses, rel=1e-9)
    assert all(torch.allclose(found[name], tensor, rtol=1e-9) for name, tensor in wanted.items())


# ---- what is refused -------------------------------------------------------------------------------------------------


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


def masked(module: Changing) -> None:
    for part in module.linear():
        prune.l1_unstructured(part, "weight", 0.5)


def reparametrized(module: Changing) -> None:
    for part in module.linear():
        parametrize.register_parametrization(part, "weight", Half())


def on_one(module: Changing) -> None:
    module.trains("scale", module.global_rank > 0)


BEHIND = "freezes, thaws or writes to parameters after its call of GPT2LMHeadModel"
REFUSED = {
    "pruned": ("before", masked, r"the parameter \S+c_fc.weight became \S+c_fc.weight_orig while training"),
    "parametrized": ("within", reparametrized, r"the parameter \S+ became \S+parametrizations.weight.original"),
    "frozen on one stage": ("before", on_one, "scale is trained on one stage and frozen on another"),
    "frozen behind": ("behind", lambda own: own.trains("scale", False), BEHIND),
    "written behind": ("behind", pruned_for_good, BEHIND),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_stage_alone_would_know_is_refused_by_name(tmp_path: Path, name: str) -> None:
    place, change, words = REFUSED[name]
    module = Changing()
    vars(module)[place] = {1: change}
    with pytest.raises(RuntimeError, match=words):
        forked(module, pipeline(2), tmp_path, **SHORT)


# ---- buffers that a block makes --------------------------------------------------------------------------------------


def counted(folder: Path) -> dict[str, list[float]]:
    module = Changing()

    def make(own: Changing) -> None:
        for part in own.linear():
            part.register_buffer("late", torch.full((3,), 1.0 + int(os.environ["LOCAL_RANK"])), persistent=False)

    module.within = {1: make}
    trainer = Trainer(**QUIET, max_steps=3, **pipeline(2, start_method="popen"))
    trainer.fit(module)
    trainer.save_checkpoint(folder / "after.ckpt")
    return {name: buffer.tolist() for name, buffer in module.named_buffers() if name.endswith("late")}


def test_buffers_that_blocks_make_are_on_all_stages_in_the_end(tmp_path: Path) -> None:
    one, two = crew(2, counted, tmp_path)
    assert not one.error, one.error
    assert one.value == two.value
    assert set(map(tuple, one.value.values())) == {(1.0,) * 3, (2.0,) * 3}
