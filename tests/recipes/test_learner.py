"""Losses, scores and parameter groups against torch, torchmetrics and transformers."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional
from torchmetrics.functional.classification import multiclass_accuracy
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_decentral.optim import muon_groups
from lightning_decentral.recipes.digits import Digits
from lightning_decentral.recipes.gpt import GPT
from lightning_decentral.recipes.learner import flat_loss
from lightning_decentral.recipes.resnet import ResNet
from lightning_decentral.recipes.schedules import constant
from lightning_decentral.recipes.vit import ViT
from tests.tiny import QUIET

VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
GPT2 = {
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 12,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
IMAGES = {"num_labels": 10, "image_size": 8, "num_channels": 1}
TRAINING = {
    "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "scheduler": constant,
}


def build(kind, config):
    torch.manual_seed(0)
    return kind(config=config, criterion=torch.nn.CrossEntropyLoss(), **TRAINING)


@pytest.fixture(params=["vit", "resnet"])
def classifier(request):
    return build(ViT, {**IMAGES, **VIT}) if request.param == "vit" else build(ResNet, {**IMAGES, **RESNET})


def test_every_parameter_is_in_one_group_and_only_matrices_decay(classifier):
    optimizer = TRAINING["optimizer"](muon_groups(classifier))
    hidden, matrices, others = (group["params"] for group in optimizer.param_groups)
    decayed = [*hidden, *matrices]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert {id(p) for p in [*decayed, *others]} == {id(p) for p in classifier.parameters()}
    assert len(decayed) + len(others) == len(list(classifier.parameters()))
    names = {id(p): name for name, p in classifier.named_parameters()}
    assert not any(names[id(p)].endswith("bias") for p in decayed)


def test_classifier_score_is_accuracy(classifier):
    images, labels = torch.randn(30, 1, 8, 8), torch.randint(10, (30,))
    classifier.eval()
    expected = multiclass_accuracy(classifier(images), labels, num_classes=10, average="micro")
    score = classifier.score((images, labels))
    assert score.shape == (30,)
    assert score.mean().item() == pytest.approx(expected.item())


def test_test_metrics_equal_those_of_all_examples_at_once(classifier, tmp_path):
    # Batches of 50 leave a last one of 10: a mean of batch means would differ.
    digits = Digits(batch_size=50)
    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    metrics = trainer.test(classifier, datamodule=digits, verbose=False)[0]
    images, labels = map(torch.stack, zip(*((x, torch.as_tensor(y)) for x, y in digits.splits["test"]), strict=True))
    classifier.eval()
    with torch.no_grad():
        logits = classifier(images)
    assert metrics["test/loss"] == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert metrics["test/accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item(), rel=1e-5)


def test_gpt_score_and_loss_are_transformers_own_shifted_loss():
    gpt = build(GPT, GPT2).eval()
    tokens = torch.randint(256, (3, 13))
    with torch.no_grad():
        score = gpt.score((tokens[:, :-1], tokens[:, 1:]))
        # A model with one more position may be given the labels unshifted.
        configuration = GPT2Config(**{**GPT2, "n_positions": 13, "bos_token_id": None, "eos_token_id": None})
        longer = GPT2LMHeadModel(configuration).eval()
        state = gpt.network.state_dict()
        state["transformer.wpe.weight"] = torch.cat([state["transformer.wpe.weight"], torch.zeros(1, 8)])
        longer.load_state_dict(state)
        each = [longer(input_ids=row[None], labels=row[None]).loss.item() for row in tokens]
    assert score.tolist() == pytest.approx(each, rel=1e-5)
    loss = flat_loss(gpt.criterion, gpt(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(sum(each) / 3, rel=1e-5)


def test_small_images_keep_their_resolution_in_the_stem():
    small, large = build(ResNet, {**IMAGES, **RESNET}), build(ResNet, {**IMAGES, **RESNET, "image_size": 224})
    sides = [net.network.resnet.embedder(torch.randn(2, 1, 8, 8)).shape[-1] for net in (small, large)]
    assert sides == [8, 2]


def test_options_reach_the_configuration_and_unknown_ones_are_named():
    assert build(ViT, {**IMAGES, **VIT, "hidden_size": 32}).network.config.hidden_size == 32
    with pytest.raises(ValueError, match=r"ViTConfig has no option hiden_size: it has .*hidden_size"):
        build(ViT, {**IMAGES, **VIT, "hiden_size": 32})
    with pytest.raises(ValueError, match="GPT2Config has no option image_size"):
        build(GPT, {**GPT2, **IMAGES})


def test_training_lowers_the_loss_of_each_recipe(classifier, tmp_path):
    digits = Digits(batch_size=64)
    trainer = Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=2, limit_val_batches=0)
    before = trainer.test(classifier, datamodule=digits, verbose=False)[0]["test/loss"]
    trainer.fit(classifier, datamodule=digits)
    after = trainer.test(classifier, datamodule=digits, verbose=False)[0]["test/loss"]
    assert after < 0.8 * before
