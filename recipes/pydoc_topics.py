"""The help texts of Python itself (`pydoc_data.topics`, about 460 KB of English). A sanity scale, no benchmark.

They differ between versions of Python, and so do the losses; in places they repeat each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pydoc_data.topics import topics

import torch

from lightning_decentral.recipes.loaders import Examples, Loaders, split
from lightning_decentral.recipes.tokens import Bytes, Tokenizer, Windows


class Pydoc(Loaders):
    """Windows of `length` tokens at random: a tenth of them for validation, a tenth for test, the rest for training."""

    def __init__(
        self, *, length: int, batch_size: int, tokenizer: Tokenizer | None = None, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.length = length
        self.tokenizer = tokenizer or Bytes()

    @property
    def sizes(self) -> dict[str, int]:
        """The tokenizer's vocabulary and the window's length."""
        return {"vocab_size": self.tokenizer.vocab_size, "n_positions": self.length}

    def read(self) -> Sequence[Examples]:
        """From the standard library, nothing is downloaded."""
        texts = self.tokenizer.encode([topics[name] for name in sorted(topics)])
        windows = Windows(torch.tensor(list(chain.from_iterable(texts)), dtype=torch.int32), self.length)
        return split(windows, [len(windows) // 10] * 2, self.seed)
