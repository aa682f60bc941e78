"""Text as tokens: tokenizers with one method, and windows of equal length for next-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_decentral.recipes.extras import extra


class Tokenizer(Protocol):
    """Texts to token ids below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""


@dataclass(frozen=True)
class Bytes:
    """The UTF-8 bytes of a text: 256 tokens, no vocabulary to fetch, the same everywhere."""

    vocab_size: int = 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """One id per byte."""
        return [list(text.encode()) for text in texts]


@dataclass(frozen=True)
class Pretrained:
    """What `transformers.AutoTokenizer` knows by `name` or reads from that folder; fetched at first use."""

    name: str

    def __getstate__(self) -> dict[str, str]:
        """Without the loaded tokenizer: equal names are equal values, also to the cache of `datasets`."""
        return {"name": self.name}

    @cached_property
    def _tokenizer(self) -> Any:
        return extra("transformers").AutoTokenizer.from_pretrained(self.name)

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens, added ones included."""
        return len(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids without special tokens: the texts are joined into one stream."""
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Example i: inputs tokens[i n : i n + n], targets tokens[i n + 1 : i n + n + 1], with n = length.

    A last incomplete window is left out.
    """

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].to(torch.int64)
        return window[:-1], window[1:]
