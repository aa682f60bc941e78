"""A rehearsal's processor time, compared with that of its forwards and backwards.

    python benchmarks/rehearse.py gradients counted.json rehearse recipe=gpt workers=4 --target 2.2

What follows the file is the command, `lightning-decentral`. Counted is the processor time of all threads since the
command began, imports left out, and in it that of the recipe's own `training_step` with its backward, and how many
these were. Validations are none of these. Of gradients that several threads compute at the same time, each thread's own
time counts: on two processors it is torch's only one.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from lightning_decentral.recipes.command import main as rehearsed
from lightning_decentral.recipes.learner import Learner

seconds = {"training_step": 0.0, "backward": 0.0}
calls = {"training_step": 0, "backward": 0}
lock = threading.Lock()


def count(owner: Any, name: str) -> None:
    """Count each call, from now on, that has to do with gradients."""
    called = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        alone = threading.current_thread() is threading.main_thread()
        clock = time.process_time if alone else time.thread_time
        begun = clock()
        found = called(*args, **options)
        if torch.is_grad_enabled():
            with lock:
                seconds[name] += clock() - begun
                calls[name] += 1
        return found

    setattr(owner, name, counted)


def main() -> None:
    count(Learner, "training_step")
    count(torch.Tensor, "backward")
    start, path = time.process_time(), Path(sys.argv.pop(1))
    try:
        rehearsed()
    finally:
        took, of_gradients = time.process_time() - start, sum(seconds.values())
        kept = {"processor_seconds": took, "gradient_seconds": of_gradients, "gradients": calls["backward"]}
        path.write_text(json.dumps(kept) + "\n")
