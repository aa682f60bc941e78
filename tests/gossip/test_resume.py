"""A checkpoint is one plain file of the mean, plus what each worker needs to go on bit for bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Codec,
    Complete,
    ConsensusControl,
    DifferenceCompression,
    Every,
    ExactDiffusion,
    Gossip,
    GradientTracking,
    Int4,
    Int8,
    LearningRatePower,
    OnePeerExponential,
    Outer,
    PeriodicAverage,
    Plain,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    RelaySum,
    Ring,
    Star,
    Stream,
    TopK,
    Travel,
    Tree,
)
from lightning_decentral.shared.compute.buckets import is_short
from lightning_decentral.shared.wire.fsdp import local
from tests.gossip.test_lightning import Backbone
from tests.tiny import QUIET, Net, SizedBatches, cut_small_models, in_processes


class SaveOwn(Callback):
    """Each worker's final parameters, buffers and optimizer moments, before the mean takes their place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        moments = [v for o in trainer.optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor)]
        state = {**pl_module.state_dict(), **{f"moment {i}": m for i, m in enumerate(moments)}}
        torch.save(
            {name: local(value).clone() for name, value in state.items()},
            self._folder / f"own-{trainer.global_rank}.pt",
        )


def own_file(folder: Path, rank: int) -> Path:
    (file,) = (folder / ".workers" / "at-step=4").glob(f"worker-{rank}-of-*.state")
    return file


def shuffled() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(48, 8, generator=generator)
    return DataLoader(
        TensorDataset(images, torch.randint(0, 3, (48,), generator=generator)), batch_size=4, shuffle=True
    )


def fit(
    folder: Path,
    size: int,
    steps: int,
    options: dict[str, Any],
    net: dict[str, Any],
    trainer_options: dict[str, Any],
    save_every: int | None,
    resume: Path | None,
    plain_loader: bool,
) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    seed_everything(5, workers=True, verbose=False)
    callbacks: list[Callback] = [SaveOwn(folder)]
    settings = {**QUIET, "max_steps": steps, **trainer_options}
    in_validation = "val_check_interval" in trainer_options
    if in_validation:
        callbacks.insert(0, EMAWeightAveraging(decay=0.5))
    if save_every:
        settings["enable_checkpointing"] = True
        when = {"save_on_train_epoch_end": False} if in_validation else {"every_n_train_steps": save_every}
        callbacks.append(ModelCheckpoint(folder, filename="at-{step}", save_top_k=-1, **when))
    module = Net(**net)
    trainer = Trainer(
        **settings, devices=size, strategy=GossipStrategy(start_method="fork", **options), callbacks=callbacks
    )
    validation = SizedBatches(2) if in_validation else None
    trainer.fit(module, shuffled() if plain_loader else SizedBatches(6), validation, ckpt_path=resume)
    return module.state_dict()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, bool]] = {
    "momentum, overlap, mid-epoch": ({}, {}, {}, 4, False),
    "AdamW, overlap, scheduler, mid-epoch": ({}, {"optimizer": "adamw", "scheduler": True}, {}, 4, False),
    "AdamW, accumulation, mid-epoch": (
        {},
        {"optimizer": "adamw", "scheduler": True},
        {"accumulate_grad_batches": 2},
        2,
        False,
    ),
    "blocking": ({"topology": OnePeerExponential(), "delay": 0}, {}, {}, 4, False),
    "two in flight": ({"delay": 2, "combine": Gossip(rate=0.4)}, {}, {}, 4, False),
    "one in flight over three steps": ({"topology": Every(3, OnePeerExponential()), "delay": 3}, {}, {}, 4, False),
    "AccumAdamW, within a window": ({}, {"optimizer": "accum_adamw"}, {}, 4, False),
    "Muon, accumulation, scheduler": (
        {},
        {"optimizer": "muon", "scheduler": True},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        2,
        False,
    ),
    "rate bound to the learning rate": (
        {"combine": Gossip(rate=LearningRatePower())},
        {"optimizer": "adamw", "scheduler": True},
        {},
        4,
        False,
    ),
    "push-sum": ({"topology": Star(), "combine": PushSum(), "delay": 2}, {"optimizer": "adamw"}, {}, 4, False),
    "quasi-global momentum": ({"combine": QuasiGlobalMomentum()}, {"scheduler": True}, {}, 4, False),
    "exact diffusion": ({"topology": Ring(), "combine": ExactDiffusion()}, {}, {}, 4, False),
    "gradient tracking": ({"combine": GradientTracking(), "bucket_bytes": 300}, {"scheduler": True}, {}, 4, False),
    "periodic average": ({"topology": PeriodicAverage(3, OnePeerExponential())}, {}, {}, 4, False),
    "outer steps": ({"topology": Every(3, RandomMatching()), "combine": Outer(), "delay": 2}, {}, {}, 4, False),
    "relayed sums": ({"topology": Tree(), "combine": RelaySum(restart=6)}, {}, {}, 4, False),
    "consensus control": ({"combine": ConsensusControl(target=0.02, probe=3), "topology": Ring()}, {}, {}, 4, False),
    "several buckets": ({"bucket_bytes": 300}, {"optimizer": "adamw"}, {}, 4, False),
    "bf16": ({}, {"optimizer": "adamw"}, {"precision": "bf16-mixed"}, 4, False),
    "Int8, two in flight, several buckets": (
        {"codec": Int8(block=16), "delay": 2, "combine": Gossip(rate=0.4), "bucket_bytes": 300},
        {},
        {},
        4,
        False,
    ),
    "compressed differences, bf16": (
        {"codec": DifferenceCompression(TopK(fraction=0.2)), "combine": Gossip(rate=0.4), "topology": Ring()},
        {"optimizer": "adamw"},
        {"precision": "bf16-mixed"},
        4,
        False,
    ),
    "compressed differences of links": (
        {"codec": DifferenceCompression(TopK(fraction=0.2)), "combine": Gossip(rate=0.4)},
        {},
        {},
        4,
        False,
    ),
    "a state that travels": (
        {"states": {"momentum_buffer": Travel(codec=Int8(block=16), every=2)}, "bucket_bytes": 300},
        {"scheduler": True},
        {},
        4,
        False,
    ),
    "fragments with anchors, after exact steps": (
        {
            "topology": Stream(2, 2, Complete()),
            "combine": PseudoGradient(lr=None, momentum=None),
            "codec": Int4(block=16),
            "exact_steps": 0.3,
        },
        {"optimizer": "muon"},
        {"val_check_interval": 4},
        4,
        False,
    ),
    "average of weights, saved in validation": ({}, {}, {"val_check_interval": 4}, 4, False),
    "end of an epoch, plain loader": ({}, {"optimizer": "adamw", "scheduler": True}, {}, 4, True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_resume_is_bit_equal_to_the_uninterrupted_run(tmp_path: Path, case: str) -> None:
    options, net, trainer_options, at, plain_loader = CASES[case]
    size = 3
    if plain_loader:
        at = 4  # 48 samples / 3 workers / batches of 4
    whole, part = tmp_path / "whole", tmp_path / "part"
    in_processes(fit, whole, size, 11, options, net, trainer_options, at, None, plain_loader)
    in_processes(fit, part, size, 11, options, net, trainer_options, None, whole / f"at-step={at}.ckpt", plain_loader)
    for rank in range(size):
        expected, measured = (torch.load(f / f"own-{rank}.pt") for f in (whole, part))
        assert {k: (expected[k] - measured[k]) for k in expected if not torch.equal(expected[k], measured[k])} == {}
    first, second = (torch.load(whole / f"own-{rank}.pt")["head.weight"] for rank in (0, 1))
    assert not torch.equal(first, second), "the workers were never apart: the test could not fail"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", ["several buckets", "Int8, two in flight, several buckets", "compressed differences of links"]
)
def test_resume_with_a_short_last_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """As of models larger than these."""
    cut_small_models(monkeypatch)
    test_resume_is_bit_equal_to_the_uninterrupted_run(tmp_path, case)
    worker = torch.load(own_file(tmp_path / "whole", 0), weights_only=True)
    elements = found(worker, "elements")
    assert is_short(elements[-1], sum(elements))
    assert len(elements) > 1


def found(tree: Any, name: str) -> Any:
    """The first value of that name, wherever it stands."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    if isinstance(tree, dict) and name in tree:
        return tree[name]
    return next((value for part in inner if (value := found(part, name)) is not None), None)


def test_the_checkpoint_is_the_mean_and_loads_without_this_package(tmp_path: Path) -> None:
    handed_back = in_processes(fit, tmp_path, 3, 4, {}, {"optimizer": "adamw"}, {}, 4, None, False)
    path = tmp_path / "at-step=4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    own = [torch.load(tmp_path / f"own-{rank}.pt") for rank in range(3)]
    for key, value in checkpoint["state_dict"].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([o[key] for o in own]).mean(0))
            torch.testing.assert_close(handed_back[key], value)
    plain = Net.load_from_checkpoint(path)
    assert plain.hparams.optimizer == "adamw"
    torch.testing.assert_close(plain.state_dict(), checkpoint["state_dict"])
    for rank in range(3):
        worker = torch.load(own_file(tmp_path, rank), weights_only=True)
        assert torch.equal(worker["state_dict"]["head.weight"], own[rank]["head.weight"])


def resume_on(folder: Path, size: int, path: Path) -> dict[str, Tensor]:
    folder.mkdir()
    module = Net(optimizer="adamw")
    start = ModelAtStart()
    strategy = GossipStrategy(start_method="fork")
    Trainer(**{**QUIET, "max_steps": 7}, devices=size, strategy=strategy, callbacks=[start, SaveOwn(folder)]).fit(
        module, SizedBatches(6), ckpt_path=path
    )
    return module.state_dict()


class ModelAtStart(Callback):
    """Checks that training starts from the checkpoint's mean."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mean = torch.load(trainer.ckpt_path, weights_only=True)["state_dict"]
        assert [k for k, v in pl_module.state_dict().items() if not torch.equal(mean[k], v)] == []


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 4])
def test_resume_on_another_number_of_workers_starts_from_the_mean_and_says_so(
    tmp_path: Path, size: int, capfd: Any
) -> None:
    whole = tmp_path / "whole"
    in_processes(fit, whole, 3, 4, {}, {"optimizer": "adamw"}, {}, 4, None, False)
    in_processes(resume_on, tmp_path / "part", size, whole / "at-step=4.ckpt")
    assert f"saved by 3 workers, resumed on {size}; all workers start from the mean" in capfd.readouterr().err


def test_a_missing_or_foreign_worker_file_means_the_mean_for_all(tmp_path: Path, capfd: Any) -> None:
    whole = tmp_path / "whole"
    in_processes(fit, whole, 2, 4, {}, {"optimizer": "adamw"}, {}, 4, None, False)
    path = whole / "at-step=4.ckpt"
    own_file(whole, 1).unlink()
    in_processes(resume_on, tmp_path / "part", 2, path)
    assert "worker 1 can't read its own state" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(b"PK\x03\x04 this is no checkpoint")
    with pytest.raises(
        RuntimeError, match=r"ValueError: can't read the checkpoint .*damaged.ckpt .*damaged or of another kind"
    ):
        in_processes(fit, tmp_path / "run", 2, 4, {}, {}, {}, None, path, False)


class Other(Net):
    """One layer more."""

    def __init__(self, **net: Any) -> None:
        super().__init__(**net)
        self.extra = torch.nn.Linear(2, 2)


def fit_other(path: Path) -> None:
    strategy = GossipStrategy(start_method="fork")
    Trainer(**QUIET, max_steps=2, devices=2, strategy=strategy).fit(Other(), SizedBatches(6), ckpt_path=path)


def test_a_checkpoint_of_another_model_is_named_in_one_line(tmp_path: Path) -> None:
    in_processes(fit, tmp_path / "whole", 2, 4, {}, {}, {}, 4, None, False)
    with pytest.raises(RuntimeError, match=r"the checkpoint is of another model: Missing key.*extra.weight"):
        in_processes(fit_other, tmp_path / "whole" / "at-step=4.ckpt")


def fit_unfreezing(folder: Path, epochs: int, resume: Path | None, codec: Codec) -> None:
    callbacks: list[Callback] = [
        BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
        ModelCheckpoint(folder, filename="at-{epoch}", save_top_k=-1),
    ]
    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": epochs}
    strategy = GossipStrategy(start_method="fork", codec=codec)
    trainer = Trainer(**settings, devices=2, strategy=strategy, callbacks=callbacks)
    trainer.fit(Backbone(), SizedBatches(3), ckpt_path=resume)


@pytest.mark.sampled
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("codec", [Plain(), DifferenceCompression(Int8())], ids=str)
def test_resume_after_unfreezing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec, cut: bool) -> None:
    """Messages in flight, and estimates, have the layout of buckets that grew while training."""
    if cut:
        cut_small_models(monkeypatch)
    in_processes(fit_unfreezing, tmp_path, 2, None, codec)
    in_processes(fit_unfreezing, tmp_path, 3, tmp_path / "at-epoch=1.ckpt", codec)


def test_removing_a_checkpoint_removes_the_workers_files(tmp_path: Path) -> None:
    in_processes(fit_top_1, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".workers", "at-step=6.ckpt"]
    assert [p.name for p in (tmp_path / ".workers").iterdir()] == ["at-step=6"]
    assert len(list((tmp_path / ".workers" / "at-step=6").iterdir())) == 2


def fit_top_1(folder: Path) -> None:
    checkpoint = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=2, save_top_k=1)
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": 6}
    strategy = GossipStrategy(start_method="fork")
    Trainer(**settings, devices=2, strategy=strategy, callbacks=[checkpoint]).fit(Net(), SizedBatches(6))


def fit_on_two_disks(folder: Path, kill: bool, resume: bool) -> None:
    """Each worker has a current folder of its own, as nodes with local disks do."""
    strategy = GossipStrategy(start_method="fork")
    callbacks = [Disks(folder, kill), SaveOwn(folder)]
    settings = {**QUIET, "max_steps": 6}
    seed_everything(5, workers=True, verbose=False)
    trainer = Trainer(**settings, devices=2, strategy=strategy, callbacks=callbacks)
    trainer.fit(Net(), SizedBatches(6), ckpt_path="last.ckpt" if resume else None)


class Disks(Callback):
    """Saves after two steps and after four; worker 1 may die at its first operation of the second save."""

    def __init__(self, folder: Path, kill: bool) -> None:
        self._folder, self._kill = folder, kill

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        place = self._folder / f"disk {trainer.global_rank}"
        place.mkdir(exist_ok=True)
        os.chdir(place)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 4 and self._kill and trainer.global_rank == 1:
            os.fsync = lambda _: os._exit(7)
        if trainer.global_step in (2, 4):
            trainer.save_checkpoint("last.ckpt")


def test_a_worker_killed_while_saving_leaves_the_save_before_on_two_disks(tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        in_processes(fit_on_two_disks, tmp_path, True, False)
    assert not (tmp_path / "disk 1" / "last.ckpt").exists()
    in_processes(fit_on_two_disks, tmp_path, False, True)
    resumed = [torch.load(tmp_path / f"own-{rank}.pt") for rank in range(2)]
    files = [p.name for p in tmp_path.rglob("disk *") for p in p.rglob("*") if p.is_file()]
    assert sorted(name.split(".")[0] for name in files) == ["last", "worker-0-of-2", "worker-1-of-2"]
    in_processes(fit_on_two_disks, tmp_path, False, False)
    for rank, state in enumerate(resumed):
        whole = torch.load(tmp_path / f"own-{rank}.pt")
        assert [k for k, v in whole.items() if not torch.equal(v, state[k])] == []


def resume_otherwise(path: Path, net: dict[str, Any], options: dict[str, Any], at_mean: bool = True) -> None:
    strategy = GossipStrategy(start_method="fork", **options)
    trainer = Trainer(**{**QUIET, "max_steps": 6}, devices=2, strategy=strategy, callbacks=[ModelAtStart()] * at_mean)
    trainer.fit(Net(**net), SizedBatches(6), ckpt_path=path)


def test_what_does_not_fit_is_named_and_all_start_from_the_mean(tmp_path: Path, capfd: Any) -> None:
    in_processes(fit, tmp_path, 2, 4, {}, {}, {}, 4, None, False)
    path = tmp_path / "at-step=4.ckpt"
    for net, options, said in (
        (
            {},
            {"codec": Int8()},
            f"saved with codec {Plain()!r}, this run has {Int8()!r}; all workers start from the mean",
        ),
        ({}, {"delay": 2, "combine": Gossip(rate=0.4)}, "saved with combine"),
        ({}, {"delay": 0}, "saved with delay 1, this run has 0"),
        ({"optimizer": "adamw"}, {}, "saved with optimizer SGD, this run has AdamW; all workers start from the mean"),
    ):
        in_processes(resume_otherwise, path, net, options)
        assert said in capfd.readouterr().err


def resume_in(path: Path, precision: Any) -> None:
    settings = {**QUIET, "max_steps": 6, "precision": precision}
    strategy = GossipStrategy(start_method="fork")
    Trainer(**settings, devices=2, strategy=strategy).fit(Net(), SizedBatches(6), ckpt_path=path)


@pytest.mark.parametrize(("precision", "said"), [
    ("bf16-true", "saved with parameter precision 32, this run has bf16; all workers start from the mean"),
    ("bf16-mixed", None),
])  # fmt: skip
def test_parameters_of_another_type_start_from_the_mean(
    tmp_path: Path, capfd: Any, precision: str, said: str | None
) -> None:
    """Messages in flight and the rule's states have the parameters' type, which a mixed precision leaves as it is."""
    in_processes(fit, tmp_path, 2, 4, {}, {}, {}, 4, None, False)
    in_processes(resume_in, tmp_path / "at-step=4.ckpt", precision)
    printed = capfd.readouterr().err
    assert (said or "") in printed
    assert ("start from the mean" in printed) == (said is not None)


def test_another_topology_goes_on_where_no_state_is_of_a_link(tmp_path: Path, capfd: Any) -> None:
    difference = {"codec": DifferenceCompression(Int8()), "combine": Gossip(rate=0.5)}
    for number, (options, said) in enumerate((
        ({}, "this run continues with OnePeerExponential()"),
        (difference, "this run has OnePeerExponential(); all workers start from the mean"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        in_processes(fit, folder, 2, 4, {**options, "topology": Ring()}, {}, {}, 4, None, False)
        other = {**options, "topology": OnePeerExponential()}
        in_processes(resume_otherwise, folder / "at-step=4.ckpt", {}, other, bool(options))
        printed = capfd.readouterr().err
        assert f"saved with topology Ring(), {said}" in printed
        assert ("start from the mean" in printed) == bool(options)


def fit_from_last(folder: Path) -> None:
    checkpoint = ModelCheckpoint(folder, save_last=True)
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": 2}
    strategy = GossipStrategy(start_method="fork")
    trainer = Trainer(**settings, devices=2, strategy=strategy, callbacks=[checkpoint])
    trainer.fit(Net(), SizedBatches(6), ckpt_path="last")


def test_the_last_checkpoint_of_an_empty_folder_is_a_new_start(tmp_path: Path, capfd: Any) -> None:
    in_processes(fit_from_last, tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert "there is no last checkpoint available" in capfd.readouterr().err
