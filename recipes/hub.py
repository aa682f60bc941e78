"""Any image or text set that the `datasets` package can load: from the Hugging Face hub or from local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_decentral.recipes.augment import Transform, chain
from lightning_decentral.recipes.extras import extra
from lightning_decentral.recipes.loaders import SPLITS, Examples, Loaders, refuse_empty, split_indices
from lightning_decentral.recipes.tokens import Tokenizer, Windows

COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True)
class Source:
    """Three tables of `datasets.load_dataset(path, name, split=..., **options)`.

    Where `validation` or `test` is None, that table is a tenth of `train`, chosen by the seed.
    """

    path: str
    name: str | None = None
    train: str = "train"
    validation: str | None = "validation"
    test: str | None = "test"
    options: Mapping[str, Any] = field(default_factory=dict)

    def tables(self, seed: int) -> list[Any]:
        """Training, validation and test table, in this order; downloads what the cache lacks."""
        train = self._load(self.train)
        held_out = [self.validation, self.test]
        parts = split_indices(len(train), [len(train) // 10 for split in held_out if split is None], seed)
        carved = iter([train.select(sorted(part)) for part in parts])
        tables = [next(carved), *(next(carved) if split is None else self._load(split) for split in held_out)]
        refuse_empty(dict(zip(SPLITS, tables, strict=True)), self.path)
        return tables

    def _load(self, split: str) -> Any:
        datasets = extra("datasets")
        try:
            return datasets.load_dataset(self.path, self.name, split=split, **self.options)
        except datasets.exceptions.DatasetsError as error:
            raise ValueError(f"can't read split '{split}' of {self.path}: {error}: check data.source") from error


def column(table: Any, name: str, parameter: str) -> str:
    """`name`, if the table has such a column, otherwise ValueError with the columns it has."""
    if name not in table.column_names:
        columns = ", ".join(table.column_names)
        raise ValueError(f"no column '{name}' in the data: set data.{parameter} to one of {columns}")
    return name


class Images(Dataset[tuple[Tensor, int]]):
    """Rows of a table as (image [channels, height, width], label), decoded and transformed when asked for."""

    def __init__(self, table: Any, image: str, label: str, channels: int, transforms: Sequence[Transform]) -> None:
        self.table = table
        self.image = column(table, image, "image")
        self.label = column(table, label, "label")
        self.channels = channels
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.table[index]
        pixels = np.array(row[self.image].convert(COLOURS[self.channels]), dtype=np.float32) / 255
        image = torch.from_numpy(pixels.reshape(*pixels.shape[:2], self.channels)).permute(2, 0, 1)
        return chain(self.transforms, image), row[self.label]


class HubImages(Loaders):
    """Images of `image_size` pixels and labels below `num_labels`, from the columns `image` and `label`.

    `train_transforms` are for training, `transforms` for validation and test; both must end in one size.
    """

    def __init__(
        self,
        *,
        source: Source,
        image_size: int,
        num_labels: int,
        train_transforms: Sequence[Transform],
        transforms: Sequence[Transform],
        batch_size: int,
        image: str = "image",
        label: str = "label",
        num_channels: int = 3,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.source = source
        self.image, self.label = image, label
        self.sides = {"num_labels": num_labels, "image_size": image_size, "num_channels": num_channels}
        self.train_transforms, self.transforms = train_transforms, transforms

    @property
    def sizes(self) -> dict[str, int]:
        """Labels, pixels and channels, as given."""
        return self.sides

    def prepare_data(self) -> None:
        """Fill the cache, once per machine."""
        self.source.tables(self.seed)

    def read(self) -> Sequence[Examples]:
        """From the cache."""
        chosen = (self.train_transforms, self.transforms, self.transforms)
        channels = self.sides["num_channels"]
        return [
            Images(table, self.image, self.label, channels, transforms)
            for table, transforms in zip(self.source.tables(self.seed), chosen, strict=True)
        ]


class HubText(Loaders):
    """Windows of `length` tokens of the column `text`, all rows joined into one stream for each split."""

    def __init__(
        self,
        *,
        source: Source,
        tokenizer: Tokenizer,
        length: int,
        batch_size: int,
        text: str = "text",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.source, self.tokenizer, self.length, self.text = source, tokenizer, length, text

    @property
    def sizes(self) -> dict[str, int]:
        """The tokenizer's vocabulary and the window's length."""
        return {"vocab_size": self.tokenizer.vocab_size, "n_positions": self.length}

    def prepare_data(self) -> None:
        """Fill the cache with tables and tokens, once per machine."""
        for table in self.source.tables(self.seed):
            self._tokenized(table)

    def read(self) -> Sequence[Examples]:
        """From the cache."""
        return [Windows(self._stream(self._tokenized(table)), self.length) for table in self.source.tables(self.seed)]

    def _tokenized(self, table: Any) -> Any:
        name = column(table, self.text, "text")
        encode = Encode(self.tokenizer, name)
        return table.map(encode, batched=True, remove_columns=table.column_names, desc="tokenizing")

    def _stream(self, table: Any) -> Tensor:
        ids = [np.asarray(chunk.flatten(), dtype=np.int32) for chunk in table.with_format("arrow")[:]["ids"].chunks]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *ids]))


@dataclass(frozen=True)
class Encode:
    """Rows to token ids; a value, so that `datasets` recognises equal work and reads it from its cache."""

    tokenizer: Tokenizer
    text: str

    def __call__(self, rows: Mapping[str, Sequence[str]]) -> dict[str, list[list[int]]]:
        """One list of ids for each row."""
        return {"ids": self.tokenizer.encode(rows[self.text])}
