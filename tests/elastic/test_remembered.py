"""What decides for all members and is in no saved state: taken from a member, places and options but each one's own."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral.elastic.loops import remember, remembered
from lightning_decentral.shared.wire.plain import pack
from tests.tiny import QUIET


class Own(ModelCheckpoint):
    """With a count of its own, beside Lightning's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted = 0


class Other(Callback):
    """That doesn't save."""

    counted = 0


def trainer(folder: Path, *savers: ModelCheckpoint) -> Trainer:
    other = Other()
    other.counted = 0
    return Trainer(**{**QUIET, "enable_checkpointing": True}, default_root_dir=folder, callbacks=[other, *savers])


def test_what_a_saver_remembers_is_the_members_and_what_it_was_given_its_own(tmp_path: Path) -> None:
    there, here = (
        trainer(tmp_path, Own(tmp_path / name, save_last=True), ModelCheckpoint(tmp_path / name, monitor="x"))
        for name in ("there", "here")
    )
    (_, first, second), (_, own, other) = there.callbacks[:3], here.callbacks[:3]
    saved: Any = {"_last_checkpoint_saved": "a.ckpt", "_last_global_step_saved": 40, "counted": 3}
    vars(first).update(saved)
    vars(second)["_defer_save_until_validation"] = True
    there._logger_connector._callback_metrics["score"] = torch.tensor(2.0)
    there._logger_connector._callback_metrics["loss"] = torch.tensor(1.0)
    here._logger_connector._callback_metrics["loss"] = torch.tensor(5.0)
    given = remembered(there)
    pack(given)  # it can be sent
    remember(here, given)
    assert {name: vars(own)[name] for name in saved} == saved
    assert vars(other)["_defer_save_until_validation"]
    assert not vars(own)["_defer_save_until_validation"]
    assert own.dirpath == str(tmp_path / "here")  # type: ignore[attr-defined]
    assert {name: float(one) for name, one in here.callback_metrics.items()} == {"score": 2.0, "loss": 5.0}
