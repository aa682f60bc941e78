"""Sliced execution against the model as `transformers` runs it whole."""

import weakref

import pytest
import torch
import transformers

from lightning_decentral.pipeline import (
    Bfloat16Activations,
    Int8Activations,
    Keep,
    OneForwardOneBackward,
    Recompute,
    TeraPipe,
    ZeroBubble,
)
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.plan.schedule import in_flight
from lightning_decentral.pipeline.wire.executor import Channel, Executor
from tests.pipeline import causal
from tests.pipeline.causal import GPT2, MODELS, apart, batch, built, sliced, token_mean, waiting, whole

pytestmark = pytest.mark.threads


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_the_whole_model(name, num_stages):
    inputs = batch()
    loss, gradients = whole(name, torch.float64, *inputs)
    found_loss, found = sliced(name, torch.float64, *inputs, num_stages=num_stages, slices=(5, 1, 4, 3), microbatches=2)
    assert found_loss == pytest.approx(loss, rel=1e-14, abs=0)
    assert apart(found, gradients) < 1e-14


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_in_float32(name):
    inputs = batch()
    loss, gradients = whole(name, torch.float32, *inputs)
    found_loss, found = sliced(name, torch.float32, *inputs, num_stages=2, slices=(6, 4, 3))
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert apart(found, gradients) < 1e-5


VARIANTS = {
    "one slice": {"slices": (13,)},
    "one token each": {"slices": (1,) * 13},
    "all forward, all backward": {"slices": (5, 4, 4), "microbatches": 3, "schedule": TeraPipe()},
    "one forward, one backward": {"slices": (5, 4, 4), "microbatches": 3},
    "recomputed": {"slices": (5, 1, 4, 3), "microbatches": 2, "activations": Recompute()},
    "split backward": {"slices": (5, 4, 4), "microbatches": 3, "schedule": ZeroBubble()},
    "split and recomputed": {"slices": (9, 4), "schedule": ZeroBubble(), "activations": Recompute()},
}


@pytest.mark.sampled
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["gpt2, tied", "qwen2, sliding from block 2"])
def test_slices_schedules_and_recomputation(name, variant, padded):
    inputs = batch(padded=padded)
    loss, gradients = whole(name, torch.float64, *inputs)
    found_loss, found = sliced(name, torch.float64, *inputs, num_stages=2, **VARIANTS[variant])
    assert found_loss == pytest.approx(loss, rel=1e-14, abs=0)
    assert apart(found, gradients) < 1e-14


class Counted(Stage):
    """Counts the chunks that were taken forward and not yet wholly back."""

    most = 0

    @property
    def held(self):
        return len(self._kept if self._weights is None else self._kept.keys() | waiting(self._weights))

    def forward(self, microbatch, index, hidden):
        output = super().forward(microbatch, index, hidden)
        self.most = max(self.most, self.held)
        return output


@pytest.mark.sampled
@pytest.mark.parametrize(
    "schedule", [TeraPipe(), OneForwardOneBackward(), ZeroBubble()], ids=lambda s: type(s).__name__
)
def test_chunks_held_are_those_of_the_plan(schedule, monkeypatch):
    monkeypatch.setattr(causal, "Stage", Counted)
    held = {}

    def watch(executor, stage):
        held[0 if stage.place.first else 1 if not stage.place.last else 2] = stage.most
        assert stage.held == 0

    sliced(
        "llama",
        torch.float32,
        *batch(4),
        num_stages=3,
        slices=(5, 4, 4),
        microbatches=4,
        schedule=schedule,
        watch=watch,
    )
    assert [held[r] for r in range(3)] == [in_flight(actions) for actions in schedule.actions(3, 4, 3)]


def test_a_slice_frees_its_activations_at_its_own_backward():
    """What autograd saved for a slice, seen by hooks on saved tensors: there until its own backward, and no longer."""
    model = adapted(built("llama", torch.float32))
    ids, _, _ = batch(padded=False)
    stage = Stage(model, StagePlace(0, 4, True, True), [Call(ids)], (5, 4, 4), Keep())
    saved = []

    class Token:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        token = Token(tensor)
        saved[-1].append(weakref.ref(token))
        return token

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
        for index in range(3):
            saved.append([])
            stage.forward(0, index, None)
    alive = lambda: [sum(ref() is not None for ref in refs) for refs in saved]  # noqa: E731
    assert all(count > 20 for count in alive())
    for index in (2, 1, 0):
        stage.backward(0, index, torch.ones(3, (5, 4, 4)[index], 61))
        assert [count == 0 for count in alive()] == [later >= index for later in range(3)]


def test_recomputation_keeps_only_what_came_in():
    ids, _, _ = batch(padded=False)
    model = adapted(built("llama", torch.float32))
    counts = {}
    for activations in (Keep(), Recompute()):
        stage = Stage(model, StagePlace(0, 4, True, True), [Call(ids)], (5, 4, 4), activations)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            stage.forward(0, 0, None)
        counts[type(activations)] = sum(kept)
    assert counts[Recompute] == 0 < counts[Keep]


def test_the_executor_refuses_a_first_slice_that_comes_back_first():
    model = adapted(built("llama", torch.float32))
    ids, _, _ = batch(padded=False)
    stage = Stage(model, StagePlace(0, 4, True, True), [Call(ids)], (9, 4), Keep())
    actions = OneForwardOneBackward().actions(1, 1, 2)[0]
    executor = Executor(stage, Channel({}, {}, torch.device("cpu")), lambda m, logits: logits.sum())
    with pytest.raises(AssertionError, match=r"B stage 0 micro-batch 0 slice 0: slices \[1\] must run backward first"):
        executor.run([*actions[:2], actions[3], actions[2]])


@pytest.mark.parametrize("activations", [Keep(), Recompute()], ids=lambda a: type(a).__name__)
def test_dropout_is_drawn_once_for_each_slice(activations):
    """With dropout there is no sequence to compare with; the recomputed slice must draw what its forward drew."""
    config = transformers.GPT2Config(**{**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})
    torch.manual_seed(0)
    model = adapted(transformers.GPT2LMHeadModel(config).double().train())
    ids, _, labels = batch(padded=False)
    stage = Stage(model, StagePlace(0, 4, True, True), [Call(ids)], (9, 4), activations)
    torch.manual_seed(1)
    Executor(stage, Channel({}, {}, torch.device("cpu")), lambda m, logits: token_mean(logits, labels)).run(
        OneForwardOneBackward().actions(1, 1, 2)[0]
    )
    found = model.module.transformer.h[0].mlp.c_fc.weight.grad
    reference = REFERENCE.setdefault("gradient", found)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)


REFERENCE: dict[str, torch.Tensor] = {}


def test_a_compressed_boundary_costs_little():
    inputs = batch()
    _, exact = sliced("llama", torch.float32, *inputs, num_stages=3, slices=(6, 4, 3))
    for boundary, allowed in ((Bfloat16Activations(), 0.05), (Int8Activations(), 0.1)):
        _, found = sliced("llama", torch.float32, *inputs, num_stages=3, slices=(6, 4, 3), boundary=boundary)
        assert 0 < apart(found, exact) < allowed


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: m.gradient_checkpointing_enable(), r"gradient checkpointing on, .*activations=Recompute\(\)"),
    (lambda m: setattr(m.config, "is_causal", False), "is_causal=False, so .* set is_causal=True, or"),
    (lambda m: m.model.layers.append(torch.nn.BatchNorm1d(4)), "BatchNorm1d, whose statistics mix the tokens"),
])  # fmt: skip
def test_what_cannot_be_sliced_is_refused(change, words):
    model = built("llama")
    change(model)
    with pytest.raises(ValueError, match=words):
        adapted(model)


@pytest.mark.parametrize(("call", "words"), [
    ({"inputs_embeds": torch.zeros(1, 4, 32)}, "with inputs_embeds"),
    ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "output_attentions": True}, "with output_attentions"),
    ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "return_dict": False}, "return_dict=False"),
    ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"input_ids of shape \(4,\)"),
    ({"labels": torch.zeros(1, 4, dtype=torch.int64)}, "without input_ids"),
    ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 1, 4, 4)}, r"\(1, 1, 4, 4\)"),
    ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "attention_mask": {}}, "attention_mask of type dict"),
    ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "position_ids": torch.ones(3, 1, 4)}, "position_ids of"),
])  # fmt: skip
def test_calls_that_cannot_be_served_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        adapted(built("llama")).read((), call)


def test_names_of_what_is_kept_stay_and_all_comes_back():
    model = adapted(built("gpt2, tied"))
    before = {n: id(p) for n, p in model.module.named_parameters()}
    model.keep(StagePlace(1, 3, False, False))
    assert {n for n, _ in model.module.named_parameters()} == {
        n for n in before if n.startswith(("transformer.h.1.", "transformer.h.2."))
    }
    model.restore()
    assert {n: id(p) for n, p in model.module.named_parameters()} == before
