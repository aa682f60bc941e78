"""Splits and batches: disjoint, complete, fixed by the seed, never empty."""

from itertools import chain
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from lightning_decentral.recipes.digits import Digits
from lightning_decentral.recipes.loaders import Loaders, split_indices
from lightning_decentral.recipes.package_text import PackageText
from lightning_decentral.recipes.pydoc_topics import Pydoc
from lightning_decentral.recipes.tokens import Bytes, Windows


class Numbers(Loaders):
    """The numbers below each length."""

    def __init__(self, lengths, batch_size):
        super().__init__(batch_size=batch_size)
        self.lengths = lengths

    @property
    def sizes(self):
        return {}

    def read(self):
        return [torch.arange(length) for length in self.lengths]


@given(st.integers(0, 200), st.integers(0, 50), st.integers(0, 50), st.integers(0, 5))
def test_split_is_a_partition(count, first, second, seed):
    if first + second > count:
        return
    parts = split_indices(count, (first, second), seed)
    assert [len(part) for part in parts] == [count - first - second, first, second]
    assert sorted(chain.from_iterable(parts)) == list(range(count))
    assert parts == split_indices(count, (first, second), seed)


def test_digits_are_scikit_learns():
    digits = Digits(batch_size=4)
    digits.setup("fit")
    assert [len(digits.splits[name]) for name in ("train", "validation", "test")] == [1257, 180, 360]
    images, labels = map(torch.stack, zip(*(pair for split in digits.splits.values() for pair in split), strict=True))
    whole = load_digits()
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min().item(), images.max().item()) == (-1, 1)
    assert ((images + 1) * 8).sum().item() == pytest.approx(whole.images.sum())
    assert labels.bincount().tolist() == torch.as_tensor(whole.target).bincount().tolist()


def test_training_batches_are_equal_and_shuffled():
    torch.manual_seed(0)
    numbers = Numbers((22, 3, 3), batch_size=4)
    numbers.setup("fit")
    batches = list(numbers.train_dataloader())
    assert [len(batch) for batch in batches] == [4] * 5
    assert torch.cat(batches).tolist() != sorted(torch.cat(batches).tolist())
    assert torch.cat(list(numbers.test_dataloader())).tolist() == [0, 1, 2]
    assert torch.cat(list(numbers.val_dataloader())).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("lengths", "name"), [((0, 1, 1), "train"), ((1, 0, 1), "validation"), ((1, 1, 0), "test")])
def test_an_empty_split_is_named(lengths, name):
    with pytest.raises(ValueError, match=f"the {name} split of Numbers has no examples"):
        Numbers(lengths, batch_size=1).setup("fit")


def test_too_large_a_batch_is_refused_with_one_that_fits():
    numbers = Numbers((22, 3, 3), batch_size=7)
    numbers.trainer = SimpleNamespace(world_size=4)
    numbers.setup("fit")
    with pytest.raises(ValueError, match=r"22 training examples give 4 workers 6 each.*set data.batch_size=6 or lower"):
        numbers.train_dataloader()


def test_windows_cover_the_text_and_targets_are_the_next_tokens():
    text = "gossip instead of all-reduce"
    tokens = torch.tensor(Bytes().encode([text])[0])
    windows = Windows(tokens, 5)
    pairs = [windows[i] for i in range(len(windows))]
    read = "".join(bytes(inputs.tolist()).decode() for inputs, _ in pairs)
    assert read == text[: 5 * ((len(text) - 1) // 5)]
    assert "".join(bytes(targets.tolist()).decode() for _, targets in pairs) == text[1 : len(read) + 1]
    with pytest.raises(IndexError):
        windows[len(windows)]
    assert len(Windows(tokens[:5], 5)) == len(Windows(tokens[:0], 5)) == 0


def test_pydoc_windows_are_those_of_the_topics():
    pydoc = Pydoc(length=64, batch_size=4)
    pydoc.setup("fit")
    assert pydoc.sizes == {"vocab_size": 256, "n_positions": 64}
    stream = "".join(topics[name] for name in sorted(topics)).encode()
    expected = [stream[i : i + 64] for i in range(0, len(stream) - 64, 64)]
    read = [bytes(inputs.tolist()) for split in pydoc.splits.values() for inputs, _ in split]
    assert sorted(read) == sorted(expected)
    assert [len(pydoc.splits[name]) for name in ("validation", "test")] == [len(expected) // 10] * 2


def test_a_packages_files_are_a_text_without_its_tests(tmp_path, monkeypatch):
    for name, text in {
        "b.py": "second",
        "a.py": "first ",
        "deep/c.py": " third",
        "tests/d.py": "x",
        "e.txt": "x",
    }.items():
        (tmp_path / "some_text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "some_text" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert "".join(PackageText(package="some_text", length=4, batch_size=1).texts()) == "first second third"


@pytest.mark.parametrize("package", ["not_installed_anywhere", "not.installed", "textwrap"])
def test_a_package_that_is_not_there_is_named(package):
    with pytest.raises(ValueError, match=f"no installed package is named '{package}': pip install it"):
        PackageText(package=package, length=4, batch_size=1).setup("fit")


def test_sympy_has_five_megabytes_and_more():
    assert sum(len(text.encode()) for text in PackageText(package="sympy", length=4, batch_size=1).texts()) > 5e6
