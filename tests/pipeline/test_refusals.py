"""What a pipeline can't train is said in one line, with what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.pipeline import Counted, Uniform
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.intercept import called
from lightning_decentral.pipeline.refusals import nothing_to_train, refuse_replaced, refuse_unserved
from lightning_decentral.pipeline.wire.ownership import check_same_groups, settings_of
from tests.pipeline.causal import built
from tests.pipeline.compute.test_adapters import Images, Perceptron
from tests.pipeline.training import Language, forked, pipeline
from tests.tiny import QUIET


class Averaging(EMAWeightAveraging):
    """A user's own."""


@pytest.mark.quick
@pytest.mark.parametrize(("callback", "words"), [
    (ModelPruning("l1_unstructured"), "ModelPruning ranks the whole model's weights.*: prune before or after the fit"),
    (Averaging(), "Averaging copies the whole model.*: average checkpoints after the fit"),
    (StochasticWeightAveraging(1e-2), "StochasticWeightAveraging copies the whole model.*: average checkpoints"),
    (BackboneFinetuning(), "BackboneFinetuning adds parameter groups to one stage.*: freeze before the fit"),
], ids=lambda of: type(of).__name__)  # fmt: skip
def test_callbacks_that_need_the_whole_model(callback: Callback, words: str) -> None:
    module: Any = SimpleNamespace(automatic_optimization=True, trainer=SimpleNamespace(callbacks=[callback]))
    with pytest.raises(ValueError, match=words):
        refuse_unserved(module)
    module.trainer.callbacks = [Callback()]
    refuse_unserved(module)


def test_they_are_refused_in_a_fit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ValueError: Averaging copies the whole"):
        forked(Language("llama"), pipeline(2), tmp_path, callbacks=[Averaging()])


class Lower(Language):
    """Its lower half is frozen."""

    def __init__(self, every: bool) -> None:
        super().__init__("llama")
        self._every = every
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[:2].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad or self._every], lr=1e-2)


def test_a_stage_without_anything_to_train_is_named(tmp_path: Path) -> None:
    words = r"ValueError: configure_optimizers finds nothing to train on stage 0 of 2 .*: give the optimizer self"
    with pytest.raises(RuntimeError, match=words):
        forked(Lower(every=False), pipeline(2, slicing=Uniform(1)), tmp_path)


def test_what_the_refusal_says_trains(tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in Lower(every=True).state_dict().items()}
    found, *_ = forked(Lower(every=True), pipeline(2, slicing=Uniform(1)), tmp_path, max_steps=1)
    moved = {name for name in found if not torch.equal(found[name], before[name])}
    assert moved
    assert all(dict(Lower(every=True).named_parameters())[name].requires_grad for name in moved)


def test_other_errors_of_configure_optimizers_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"^another$"), nothing_to_train(0, 2):
        raise ValueError("another")


def test_generation_is_refused_in_its_own_words() -> None:
    model, ids = adapted(built("llama")), torch.zeros(1, 4, dtype=torch.int64)
    words = r"keys and values of an earlier call, as generate\(\) does, which no stage keeps: generate after the fit"
    with pytest.raises(ValueError, match=words):
        called(model, lambda: model.module.generate(ids, max_new_tokens=2, pad_token_id=0))


def test_optimizers_of_pipelines_that_gossip_are_not_replaced_in_a_fit() -> None:
    refuse_replaced(False)
    with pytest.raises(ValueError, match="in the middle of a fit, but pipelines that gossip keep the former"):
        refuse_replaced(True)


# ---- groups that differ -------------------------------------------------------------------------------------------


def test_groups_are_compared_in_numbers_and_settings() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": torch.tensor(0.5)}, {"params": []}]
    one, other = (settings_of(torch.optim.SGD(groups[: 2 - few], lr=0.1, foreach=False)) for few in (0, 1))
    check_same_groups([[one], [one]])
    with pytest.raises(ValueError, match=r"differ between stages \(1 on worker 1, 2 on worker 0\)"):
        check_same_groups([[one], [other]])
    changed = [{**one[0], "lr": "0.25"}, one[1]]
    with pytest.raises(ValueError, match=r"\(group 0: lr=0.25 on worker 2, 0.5 on worker 0\)"):
        check_same_groups([[one], [one], [changed]])


class Unfreeze(Callback):
    """By hand, what BaseFinetuning would do; then it saves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            trainer.optimizers[0].add_param_group({"params": []})
        trainer.save_checkpoint(self._folder / "file.ckpt")


def test_a_checkpoint_of_other_groups_is_an_error_on_all_stages(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: the optimizer's groups differ between stages \("):
        forked(Language("llama"), pipeline(2), tmp_path, callbacks=[Unfreeze(tmp_path)])


class Later(Language):
    """Its model is made where processes have started."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None: ...


class InSetup(Language):
    """Its model is made in the hook `setup`, in each process."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def setup(self, stage: str) -> None: ...

    def pipeline_stages(self) -> Any:
        raise AttributeError("the model isn't there yet")


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
@pytest.mark.parametrize("module", [Language, Perceptron, lambda: Images("vit")])
def test_more_stages_than_blocks_are_refused_before_a_process_starts(
    module: Any, start_method: Any, no_processes: None
) -> None:
    for options, words in (
        ({"devices": 16}, "16 stages for a model of [4-6] blocks: use 1 to [4-6] stages"),
        ({"devices": 4, "stages": 3}, "4 workers aren't a multiple of stages=3"),
        ({"devices": 2, "partition": Counted((1, 1))}, "and [4-6] blocks: give one number for each stage"),
    ):
        devices = options.pop("devices")
        strategy: Any = TokenPipelineStrategy(start_method=start_method, **options)
        with pytest.raises(ValueError, match=words):
            Trainer(**QUIET, devices=devices, strategy=strategy).fit(module())
    with pytest.raises(AssertionError, match="a process would start"):
        Trainer(**QUIET, devices=16, strategy=TokenPipelineStrategy()).fit(Later())
    with pytest.raises(AssertionError, match="a process would start"):
        Trainer(**QUIET, devices=16, strategy=TokenPipelineStrategy()).fit(InSetup())
