"""A rehearsal's processor time beside that of the forwards and backwards in it.

    python benchmarks/rehearsed_gradients.py counted.json rehearse recipe=gpt workers=4 --target 2.2

What follows the file is the command, `lightning-decentral`. Counted is the processor time of all threads since the
command began, imports left out, and in it that of the recipe's own `training_step` with its backward. Validations are
none of these.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_decentral.recipes.command import main
from lightning_decentral.recipes.learner import Learner

seconds = {"training_step": 0.0, "backward": 0.0}


def count(owner: Any, name: str) -> None:
    """Of each call from now on that has to do with gradients."""
    called = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        begun = time.process_time()
        found = called(*args, **options)
        if torch.is_grad_enabled():
            seconds[name] += time.process_time() - begun
        return found

    setattr(owner, name, counted)


if __name__ == "__main__":
    count(Learner, "training_step")
    count(torch.Tensor, "backward")
    start, path = time.process_time(), Path(sys.argv.pop(1))
    try:
        main()
    finally:
        kept = {"processor_seconds": time.process_time() - start, "gradient_seconds": sum(seconds.values())}
        path.write_text(json.dumps(kept) + "\n")
