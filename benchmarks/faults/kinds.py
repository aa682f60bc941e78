"""What is done to a worker, and when: faults are moments with an act, on one worker or on all."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from faults.worker import Fault, Worker

Act = Callable[[LightningModule | None], None]
STEP = 6  # in the second of three epochs of four batches: one checkpoint is complete
SAVE = 3  # each epoch saves two files: from here the second epoch's


def on(rank: int, fault: Fault) -> Fault:
    """Restrict the fault to this worker."""
    return lambda worker: fault(worker) if worker.rank == rank else None


# ---- acts ------------------------------------------------------------------------------------------------------------


def by_signal(number: int) -> Act:
    return lambda module: os.kill(os.getpid(), number)


kill, stop, interrupt, terminate = (
    by_signal(s) for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM)
)


def fail(module: LightningModule | None) -> None:
    raise ArithmeticError("this worker is unlucky")


def leave(module: LightningModule | None) -> None:
    """End the process as a job does whose time is over."""
    os._exit(0)


def poison(value: float, where: str) -> Act:
    """One number of one parameter, buffer or gradient."""

    def act(module: LightningModule | None) -> None:
        assert module is not None
        tensors = {
            "parameter": [p for p in module.parameters() if p.requires_grad],
            "buffer": [b for b in module.buffers() if b.is_floating_point()],
        }[where]
        with torch.no_grad():
            tensors[0].view(-1)[0] = value

    return act


REACHED = "reached"  # file of a run whose fault was injected


def marked(act: Act, worker: Worker) -> Act:
    """The act, which leaves a file first: a run that ended before it proves nothing."""

    def marking(module: LightningModule | None) -> None:
        (worker.folder.parent / REACHED).touch()
        act(module)

    return marking


# ---- moments ---------------------------------------------------------------------------------------------------------


class At(Callback):
    """Does it where Lightning calls this hook, once, from the given optimizer step on."""

    def __init__(self, hook: str, act: Act, step: int = 0) -> None:
        self._act, self._step, self._done = act, step, False
        setattr(self, hook, self._now)

    def _now(self, trainer: Trainer, module: LightningModule, *_: Any, **__: Any) -> None:
        if not self._done and trainer.global_step >= self._step:
            self._done = True
            self._act(module)


def hook(name: str, step: int = 0) -> Callable[[Act], Fault]:
    return lambda act: lambda worker: worker.callbacks.append(At(name, marked(act, worker), step))


def before_the_world(act: Act) -> Fault:
    return lambda worker: marked(act, worker)(None)


def in_group_making(act: Act) -> Fault:
    """Inject the fault when the second group is made."""

    def fault(worker: Worker) -> None:
        inner, calls = dist.new_group, []

        def new_group(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                marked(act, worker)(None)
            return inner(*args, **options)

        dist.new_group = new_group

    return fault


def in_configure_model(act: Act) -> Fault:
    def fault(worker: Worker) -> None:
        from faults.worker import METHODS

        kind = METHODS[worker.method].module
        sick = type("Sick", (kind,), {"configure_model": lambda self: marked(act, worker)(self)})
        worker.make = lambda worker: sick(**worker.module)

    return fault


MOMENTS: dict[str, Callable[[Act], Fault]] = {
    "before the world is made": before_the_world,
    "as groups are made": in_group_making,
    "in configure_model": in_configure_model,
    "as the fit starts": hook("on_fit_start"),
    "in a step": hook("on_train_batch_start", STEP),
    "before an update": hook("on_before_optimizer_step", STEP),
    "in validation": hook("on_validation_batch_start", STEP),
    "as it saves": hook("on_save_checkpoint", STEP),
    "as the fit ends": hook("on_train_end"),
}


# ---- of the machine --------------------------------------------------------------------------------------------------


def slow(seconds: float) -> Fault:
    """Every step takes so long."""

    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(seconds)

    return lambda worker: worker.callbacks.append(Slow())


class _Saves(Callback):
    """Callback that acts around the saves of the second epoch."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end, self._count = begin, end, 0

    def on_save_checkpoint(self, *_: Any) -> None:
        self._count += 1
        if self._count == SAVE:
            self._begin()

    def on_train_epoch_start(self, *_: Any) -> None:
        self._end()

    on_train_end = on_train_epoch_start


def no_room(worker: Worker) -> None:
    """Limit files to 10,000 bytes in the saves of the second epoch: a write fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    worker.callbacks.append(
        _Saves(
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard)),
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard)),
        )
    )


def killed_at_operation(number: int) -> Fault:
    """Kill the worker at the number-th opening, renaming, making or removing of a file in the second epoch's saves."""

    def fault(worker: Worker) -> None:
        state = {"saving": False, "count": 0}
        place = str(worker.folder)

        def heard(event: str, args: tuple[Any, ...]) -> None:
            if not state["saving"] or event not in (
                "open",
                "os.rename",
                "os.remove",
                "os.mkdir",
                "os.rmdir",
                "os.link",
            ):
                return
            if any(str(part).startswith(place) for part in args[:2] if isinstance(part, (str, bytes, Path))):
                state["count"] += 1
                if state["count"] == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(heard)
        worker.callbacks.append(_Saves(lambda: state.update(saving=True), lambda: state.update(saving=False)))

    return fault


# ---- other settings --------------------------------------------------------------------------------------------------


def changed(**parts: Any) -> Fault:
    """Other fields of the worker; dictionaries are added to those that are there."""

    def fault(worker: Worker) -> None:
        for name, value in parts.items():
            before = getattr(worker, name)
            setattr(worker, name, {**before, **value} if isinstance(before, dict) else value)

    return fault


def strategy(**options: Any) -> Fault:
    return changed(strategy=options)


def trainer(**options: Any) -> Fault:
    return changed(trainer=options)


def module(**options: Any) -> Fault:
    return changed(module=options)


def made(make: Callable[[LightningModule], LightningModule]) -> Fault:
    """The module as this makes it of the plain one."""

    def fault(worker: Worker) -> None:
        from faults.worker import METHODS

        worker.make = lambda worker: make(METHODS[worker.method].module(**worker.module))

    return fault


def version(name: str, value: str) -> Fault:
    """This worker believes to have another version of a package."""

    def fault(worker: Worker) -> None:
        import importlib

        importlib.import_module(name).__version__ = value

    return fault
