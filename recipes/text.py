"""A text that is on this machine, as windows of tokens in three fixed splits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain

import torch

from lightning_decentral.recipes.loaders import Examples, Loaders, split
from lightning_decentral.recipes.tokens import Bytes, Tokenizer, Windows


class Text(Loaders):
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

    @abstractmethod
    def texts(self) -> Sequence[str]:
        """In an order that is the same on every worker."""

    def read(self) -> Sequence[Examples]:
        """Nothing is downloaded."""
        tokens = chain.from_iterable(self.tokenizer.encode(self.texts()))
        windows = Windows(torch.tensor(list(tokens), dtype=torch.int32), self.length)
        return split(windows, [len(windows) // 10] * 2, self.seed)
