"""What a step reads, logs and hands over."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, Planned
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.intercept import Once, answering, called
from lightning_decentral.pipeline.compute.loss import Share, TargetCount, deliver, total
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.training_step import Logs, checksum, split
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from tests.pipeline.causal import batch, built
from tests.pipeline.training import Language


def test_a_batch_is_cut_whatever_it_is_made_of():
    first, second = split({"ids": torch.arange(10).view(5, 2), "names": "kept", "more": [torch.arange(5)]}, 2)
    assert torch.equal(first["ids"], torch.arange(6).view(3, 2))
    assert torch.equal(second["more"][0], torch.arange(3, 5))
    assert first["names"] == second["names"] == "kept"
    with pytest.raises(ValueError, match=r"the tensors of the batch have \[4, 5\] rows"):
        split([torch.zeros(4), torch.zeros(5)], 2)


def test_targets_are_counted_where_the_loss_is_their_mean():
    logits, targets = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 1, -100, 2, -100, 0])
    with TargetCount() as count:
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, targets)
        log_likelihood = functional.nll_loss(logits.log_softmax(-1), targets)
        summed = functional.cross_entropy(logits, targets, reduction="sum")
        weighted = functional.cross_entropy(logits, targets, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert count.targets(loss) == count.targets(log_likelihood) == 4
    assert [count.targets(other) for other in (summed, weighted, 2 * loss)] == [None] * 3


def test_means_of_parts_are_weighted_by_their_targets():
    loss, factor = total([Share(3 / 12, 2.0), Share(6 / 12, 5.0), Share(0.0, float("nan"))])
    assert loss == pytest.approx((3 * 2 + 6 * 5) / 9)
    assert factor == pytest.approx(12 / 9)
    assert total([Share(0.0, float("nan"))])[1] == 0


def test_gradients_are_handed_over_by_a_loss():
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    weight.grad = torch.full((3,), 10.0)
    loss = deliver(torch.tensor(7.0), [torch.tensor([1.0, 2.0, 3.0]), None], [weight, bias])
    assert float(loss) == 7
    (loss / 4 * 8).backward(retain_graph=True)
    assert weight.grad.tolist() == [12.0, 14.0, 16.0]
    assert bias.grad is None
    with pytest.raises(RuntimeError, match="goes back once"):
        loss.backward()


def test_the_model_is_answered_for_and_then_itself_again():
    model = adapted(built("llama"))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with answering(model, lambda call: call.inputs.shape):
        assert model.module(ids) == (1, 4)
    assert model.module(ids).logits.shape == (1, 4, 61)
    assert torch.equal(called(model, lambda: model.module(input_ids=ids, labels=ids)).extra["labels"], ids)
    with pytest.raises(ValueError, match="returned without calling LlamaForCausalLM"):
        called(model, lambda: None)
    once = Once(lambda call: None, "Llama")
    once(Call(ids))
    with pytest.raises(ValueError, match="called Llama twice"):
        once(Call(ids))


def test_metrics_objects_are_refused():
    module = Language("llama")
    with Logs(module).recording(keep=True), pytest.raises(ValueError, match="got a MeanMetric in training_step"):
        module.log("loss", MeanMetric())
    assert "log" not in vars(module)


def test_batches_that_differ_are_told_apart():
    ids, _, _ = batch()
    assert checksum([ids]) == checksum([ids.clone()])
    assert len({checksum([x]) for x in (ids, ids.roll(1, 0), ids.roll(1, 1), ids + 1)}) == 4


def test_a_measurement_serves_all_shorter_sequences():
    model = adapted(built("llama", torch.float32))
    place = StagePlace(0, 4, True, True)
    pipe = StageRunner(model, place, None, {}, schedule=OneForwardOneBackward(), activations=Keep(),
                boundary=ExactActivations(), device=torch.device("cpu"))  # fmt: skip
    plans = SlicePlanner(OneForwardOneBackward(), 1)
    plans.stages = ["the only one"]
    sizes = [(2, 48), (2, 24), (2, 56), (1, 24)]
    found = []
    for size in sizes:
        call = Call(torch.zeros(size, dtype=torch.int64))
        plans.measure(call, pipe, None)
        slices = plans.make(Planned(), call, pipe)
        assert sum(slices) == size[1]
        found.append(plans.profiles)
    assert found[1] is found[0]
    assert found[2] is not found[1]
    assert found[3] is not found[2]
    assert plans.known(Call(torch.zeros(2, 48)), 48) is not None
    assert plans.expected().seconds > 0
    assert {"slices", "bubble", "fit of the costs", "memory"} <= set(plans.summary())
