"""Sets of the hub's layouts, as small local files: image folders, CIFAR's columns in parquet, lines of text."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_decentral.recipes.augment import CenterCrop, Normalise, RandomCrop, RandomFlip, Resize
from lightning_decentral.recipes.hub import HubImages, HubText, Source
from lightning_decentral.recipes.tokens import Bytes, Pretrained

COUNT = 30


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def picture(i, size=(12, 10)):
    return Image.new("RGB", size, (8 * i, 255 - 8 * i, 40))


@pytest.fixture
def image_folder(tmp_path):
    for i in range(COUNT):
        place = tmp_path / "images" / ("test" if i % 3 == 0 else "train") / ("even" if i % 2 == 0 else "odd")
        place.mkdir(parents=True, exist_ok=True)
        picture(i).save(place / f"{i:02}.png")
    return str(tmp_path / "images")


@pytest.fixture
def cifar_parquet(tmp_path):
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split in ("train", "test"):
        rows = {"img": [picture(i, (32, 32)) for i in range(COUNT)], "label": [i % 10 for i in range(COUNT)]}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    return {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}


@pytest.fixture
def wiki_text(tmp_path):
    texts = {split: [f"{split} line {i} of ünïcode" for i in range(40)] for split in ("train", "validation", "test")}
    for split, lines in texts.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return {split: str(tmp_path / f"{split}.txt") for split in texts}, texts


def images(source, **options):
    defaults = {"image_size": 8, "num_labels": 2, "train_transforms": [], "transforms": [], "batch_size": 4}
    return HubImages(source=source, **{**defaults, **options})


def lines(files, **options):
    defaults = {"tokenizer": Bytes(), "length": 8, "batch_size": 2}
    return HubText(source=Source("text", options={"data_files": files}), **{**defaults, **options})


def test_image_folder_gives_its_pixels_and_labels(image_folder):
    source = Source("imagefolder", validation=None, options={"data_dir": image_folder})
    folder = images(source, transforms=[Resize(8), CenterCrop(8)], train_transforms=[CenterCrop(8), RandomFlip()])
    folder.prepare_data()
    folder.setup("fit")
    assert {name: len(split) for name, split in folder.splits.items()} == {"train": 18, "validation": 2, "test": 10}
    seen = set()
    for image, label in folder.splits["test"]:
        i = round(float(image[0, 0, 0]) * 255 / 8)
        assert label == i % 2
        colour = torch.tensor([8 * i, 255 - 8 * i, 40]) / 255
        assert torch.allclose(image, colour[:, None, None].expand(3, 8, 8), atol=1e-5)
        seen.add(i)
    assert seen == set(range(0, COUNT, 3))
    batch, labels = next(iter(folder.train_dataloader()))
    assert batch.shape == (4, 3, 8, 8)
    assert labels.dtype == torch.int64


def test_cifar_layout_with_its_augmentation(cifar_parquet):
    source = Source("parquet", validation=None, options={"data_files": cifar_parquet})
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.2, 0.2]
    normalise = Normalise(mean, std)
    chosen = {"train_transforms": [RandomCrop(4), normalise], "transforms": [normalise]}
    cifar = images(source, image="img", num_labels=10, **chosen)
    cifar.setup("fit")
    assert [len(cifar.splits[name]) for name in ("train", "validation", "test")] == [27, 3, 30]
    image, label = cifar.splits["test"][7]
    expected = (np.asarray(picture(7, (32, 32)), dtype=np.float32) / 255 - mean) / std
    assert np.allclose(image.permute(1, 2, 0), expected, atol=1e-5)
    assert label == 7
    assert next(iter(cifar.train_dataloader()))[0].shape == (4, 3, 32, 32)


def test_grey_images_have_one_channel(tmp_path):
    for i in range(10):
        place = tmp_path / "grey" / "train" / str(i % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), 20 * i).save(place / f"{i}.png")
    source = Source("imagefolder", validation=None, test=None, options={"data_dir": str(tmp_path / "grey")})
    grey = images(source, num_channels=1)
    grey.setup("fit")
    values = sorted(round(float(image.mean()) * 255) for split in grey.splits.values() for image, _ in split)
    assert values == [20 * i for i in range(10)]
    assert grey.splits["train"][0][0].shape == (1, 4, 4)


def test_text_as_bytes_is_the_text(wiki_text):
    files, texts = wiki_text
    text = lines(files, length=16)
    text.prepare_data()
    text.setup("fit")
    for name in ("train", "validation", "test"):
        assert bytes(text.splits[name].tokens.tolist()).decode() == "".join(texts[name])
    inputs, targets = next(iter(text.val_dataloader()))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert text.sizes == {"vocab_size": 256, "n_positions": 16}


def test_pretrained_tokenizer_is_transformers_own(wiki_text, tmp_path):
    words = Tokenizer(models.WordLevel({"line": 0, "of": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "words")
    files, texts = wiki_text
    tokenizer = Pretrained(str(tmp_path / "words"))
    text = lines(files, tokenizer=tokenizer)
    text.setup("fit")
    expected = [{"line": 0, "of": 1}.get(word, 2) for line in texts["test"] for word in line.split()]
    assert text.splits["test"].tokens.tolist() == expected
    assert text.sizes["vocab_size"] == 3


def test_tokens_are_read_from_the_cache_the_second_time(wiki_text, monkeypatch):
    files, _ = wiki_text
    lines(files).prepare_data()
    monkeypatch.setattr(Bytes, "encode", lambda self, texts: pytest.fail("tokenized again"))
    second = lines(files)
    second.setup("fit")
    assert len(second.splits["train"]) > 0


def test_a_wrong_column_is_named_with_those_there_are(cifar_parquet, wiki_text):
    source = Source("parquet", validation=None, options={"data_files": cifar_parquet})
    with pytest.raises(ValueError, match=r"no column 'image' in the data: set data.image to one of img, label"):
        images(source).setup("fit")
    with pytest.raises(ValueError, match=r"no column 'body' in the data: set data.text to one of text"):
        lines(wiki_text[0], text="body").setup("fit")


def test_no_text_at_all_is_refused(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    source = Source("text", validation=None, test=None, options={"data_files": {"train": str(empty)}})
    with pytest.raises(ValueError, match=r"split 'train' of text: .*check data.source"):
        HubText(source=source, tokenizer=Bytes(), length=8, batch_size=2).setup("fit")
