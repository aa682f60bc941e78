"""Models without memory, and parts of them with the values of the whole."""

from contextlib import contextmanager

import pytest
import torch
import transformers
from lightning.pytorch import Callback
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.pipeline.compute.deferred_init import Deferred, tensors_of
from tests.pipeline.causal import LLAMA, MODELS
from tests.pipeline.test_strategy import saving
from tests.pipeline.training import Language, alone, distance, fit, forked, pipeline


class Odd(nn.Module):
    """What else an initialization may do: reads, copies, types, views, orthogonal matrices, marks, draws."""

    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 0.1, 3).tolist()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(0.5 * torch.ones(3, 4, dtype=torch.float32))
        self.embedding = nn.Embedding(5, 4, padding_idx=2)
        self.linear = nn.Linear(4, 4).to(torch.bfloat16)
        nn.init.orthogonal_(self.b)
        nn.init.trunc_normal_(self.a[1:], std=0.02)
        with torch.no_grad():
            self.linear.weight.copy_(self.a.t())
        self.wide = nn.Parameter(torch.ones(16, 5, dtype=torch.float32))
        self.wide._no_weight_decay = True
        self.wide.data[:, :3].normal_()  # not dense: drawn one by one
        rates = torch.full((9,), 40.0, dtype=torch.float32)
        self.register_buffer("counts", torch.poisson(rates))  # takes as many numbers as the rates ask for
        self.register_buffer("coins", torch.bernoulli(rates / 80))
        self.register_buffer("steps", torch.normal(0.0, rates))
        self.plain = torch.rand(3, generator=torch.Generator().manual_seed(7))
        torch.manual_seed(11)
        self.register_buffer("drawn", torch.randperm(6))


VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8}
BUILT = {
    **MODELS,
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, patch_size=4)),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
    "odd": Odd,
}


@contextmanager
def default(dtype):
    """As Lightning's precision="bf16-true" and "64-true" while a module is built."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", BUILT)
def test_values_are_those_of_a_model_built_at_once(name, dtype):
    torch.manual_seed(3)
    with default(dtype):
        wanted = BUILT[name]()
    after = torch.rand(1)
    torch.manual_seed(3)
    deferred = Deferred()
    with default(dtype), deferred:
        found = BUILT[name]()
    assert torch.equal(torch.rand(1), after)
    assert all(p.is_meta for p in found.parameters())
    objects = {n: id(p) for n, p in found.named_parameters()}
    deferred.materialize(tensors_of(found), set(found.parameters()))
    assert objects == {n: id(p) for n, p in found.named_parameters()}
    for ours, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride(), type(ours)) == (theirs.dtype, theirs.stride(), type(theirs))
        assert ours.requires_grad == theirs.requires_grad
        assert vars(ours) == vars(theirs)
    assert getattr(found, "rate", None) == getattr(wanted, "rate", None)


def test_what_was_copied_in_and_changed_afterwards():
    deferred, small, large = Deferred(), torch.ones(3), torch.ones(2**15)
    with deferred:
        found, other = torch.empty(3).copy_(small), torch.empty(2**15).copy_(large)
        small.mul_(2)
    assert deferred.made(found).tolist() == [1, 1, 1]
    assert torch.equal(deferred.made(other), large)
    large.mul_(2)
    with pytest.raises(ValueError, match=r"shape \(32768,\) was copied into the model and changed"):
        deferred.made(other)


def test_a_hook_that_would_be_lost_is_refused():
    deferred = Deferred()
    with deferred:
        model = nn.Linear(2, 3)
        model.weight.register_hook(torch.neg)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) got a hook .* on_fit_start"):
        deferred.materialize([model.bias, model.weight], {model.bias})


def test_a_pretrained_model_is_read(tmp_path):
    wanted = MODELS["llama"]()
    wanted.save_pretrained(tmp_path)
    deferred = Deferred()
    with torch.device("cpu"), deferred:
        found = type(wanted).from_pretrained(tmp_path)
    deferred.materialize(tensors_of(found), set(found.parameters()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True))


def test_what_has_memory_is_left_alone():
    deferred, real = Deferred(), torch.ones(3)
    with deferred:
        real.mul_(2)
        made = torch.arange(3.0)
        real.add_(made)
    assert real.tolist() == [2, 3, 4]
    assert made.is_meta
    assert deferred.made(made).tolist() == [0, 1, 2]
    assert deferred.made(real) is real


class Watch(TorchDispatchMode):
    """The most bytes of tensors that were alive at once."""

    def __init__(self):
        super().__init__()
        self._alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu":
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


def test_a_part_takes_the_memory_of_the_part():
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 12})
    deferred, watch = Deferred(), Watch()
    with watch:
        with deferred:
            model = transformers.LlamaForCausalLM(config)
        kept = [p for n, p in model.named_parameters() if any(f"layers.{i}." in n for i in (3, 4))]
        gone = [p for p in model.parameters() if all(p is not k for k in kept)]
        deferred.materialize([*model.parameters(), *model.buffers()], set(kept))
    whole = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters()) * 4
    own = sum(p.numel() for p in kept) * 4
    largest = max(p.numel() for p in transformers.LlamaForCausalLM(config).parameters()) * 4
    assert own < whole / 5
    assert watch.most < own + 3 * largest  # what is drawn, and what a generator remembers
    assert all(p.numel() == 0 for p in gone)


# ---- in training ----------------------------------------------------------------------------------------------------


class Configured(Language):
    """Its model is built when the trainer asks for it, and once only."""

    def __init__(self, name="llama", **options):
        super().__init__(name, **options)
        self._model_name = name
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(3)
            self.model = MODELS[self._model_name]()
            self.place = next(self.model.parameters()).untyped_storage().device.type

    def on_train_start(self):
        assert self.place == ("meta" if isinstance(self.trainer.strategy, TokenPipelineStrategy) else "cpu")


class Whole(Callback):
    """Saves the module when it has been put together again."""

    def __init__(self, path):
        self._path = path

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            torch.save(pl_module.state_dict(), self._path)


def test_training_of_a_model_that_was_never_whole(tmp_path):
    make = lambda: Configured("gpt2, tied", dtype=torch.float32, sgd=True)  # noqa: E731
    wanted, losses, metrics = fit(make(), alone(), tmp_path / "a", **saving(tmp_path / "a"))
    _, found_losses, found_metrics = forked(make(), pipeline(3), tmp_path / "b", **saving(tmp_path / "b"))
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert found_metrics == pytest.approx(metrics, rel=1e-5)
    saved = torch.load(tmp_path / "b" / "step=6.ckpt", weights_only=True)["state_dict"]
    assert distance(saved, wanted) < 1e-4
    callbacks = {"callbacks": [Whole(tmp_path / "whole.pt")]}
    _, resumed, _ = forked(make(), pipeline(3), tmp_path / "c", str(tmp_path / "b" / "step=3.ckpt"), **callbacks)
    assert resumed == found_losses[3:]
    again = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(again[key], tensor) for key, tensor in saved.items())
