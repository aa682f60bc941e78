"""What a step reads, logs and hands over."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, Planned
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.intercept import Suspended, answering, called
from lightning_decentral.pipeline.compute.loss import TargetCount, total, weighed
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import deliver
from lightning_decentral.pipeline.logs import Logs
from lightning_decentral.pipeline.users_step import TrainingStep, finite, multiply, split
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner, checksum
from tests.pipeline.causal import batch, built, token_mean
from tests.pipeline.training import Language, alone, fit, forked, pipeline


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
    assert count.targets(loss).tolist() == count.targets(log_likelihood).tolist() == 4
    assert [count.targets(other) for other in (summed, weighted, 2 * loss)] == [None] * 3


def test_means_of_parts_are_weighted_by_their_targets():
    weights, nan = torch.tensor([3 / 12, 6 / 12, 0.0]), float("nan")
    loss, factor = total(weights, torch.tensor([2.0, 5.0, nan]))
    assert float(loss) == pytest.approx((3 * 2 + 6 * 5) / 9)
    assert float(factor) == pytest.approx(12 / 9)
    assert total(weights, torch.tensor([[1.0, 1.0, nan], [nan, 2.0, 2.0]]))[0].isfinite().tolist() == [True, False]
    loss, factor = total(torch.zeros(1), torch.tensor([nan]))
    assert loss.isnan()
    assert factor == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_no_target_adds_no_gradient(smoothing):
    logits = torch.randn(4, 3, requires_grad=True)
    with TargetCount() as count:
        loss = functional.cross_entropy(logits, torch.full((4,), -100), label_smoothing=smoothing)
    assert loss.isnan()
    weighed(loss, count.targets(loss).double() / 4).backward()
    assert torch.equal(logits.grad, torch.zeros(4, 3))


def test_gradients_are_handed_over_by_a_loss():
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    weight.grad = torch.full((3,), 10.0)
    loss = deliver(torch.tensor(7.0), [torch.tensor([1.0, 2.0, 3.0]), None], [weight, bias])
    assert float(loss) == 7
    (loss / 4 * 8).backward(retain_graph=True)
    assert weight.grad.tolist() == [12.0, 14.0, 16.0]
    assert bias.grad is None
    with pytest.raises(RuntimeError, match="loss has one backward"):
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


CPU = torch.device("cpu")


def test_a_step_waits_at_its_call_and_goes_on_there_in_the_same_modes():
    model, ids, found = adapted(built("llama")), torch.zeros(1, 4, dtype=torch.int64), []

    def step():
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        found.append(model.module(input_ids=ids))
        ones = torch.ones(2, 2, device=CPU)
        return ones @ ones, torch.zeros(1).device

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        waiting = Suspended(model, step, CPU)
        assert found == [(False, True, torch.bfloat16)]
        assert model.module(ids.to("cpu")).logits.shape == (1, 4, 61), "the model is itself meanwhile"
        product, place = waiting.go_on(lambda call: call.inputs.shape)
    assert found[1] == (1, 4)
    assert (product.dtype, place.type) == (torch.bfloat16, "meta")


def test_what_a_step_raises_on_either_side_of_its_call_is_raised():
    model, ids = adapted(built("llama")), torch.zeros(1, 4, dtype=torch.int64)

    def before():
        raise KeyError("before")

    def behind():
        model.module(input_ids=ids)
        raise KeyError("behind")

    def twice():
        return [model.module(input_ids=ids) for _ in range(2)]

    with pytest.raises(KeyError, match="before"):
        Suspended(model, before, CPU)
    with pytest.raises(KeyError, match="behind"):
        Suspended(model, behind, CPU).go_on(lambda call: call.inputs)
    with pytest.raises(ValueError, match="called LlamaForCausalLM twice"):
        Suspended(model, twice, CPU).go_on(lambda call: call.inputs)
    with pytest.raises(ValueError, match="returned without calling LlamaForCausalLM"):
        Suspended(model, lambda: None, CPU)


def test_a_step_that_is_given_up_leaves_its_call():
    model, ids, left = adapted(built("llama")), torch.zeros(1, 4, dtype=torch.int64), threading.Event()

    def step():
        try:
            model.module(input_ids=ids)
        finally:
            left.set()

    waiting = Suspended(model, step, CPU)
    assert not left.wait(0.01)
    waiting.end()
    assert left.wait(30)


def test_metrics_objects_are_refused():
    module = Language("llama")
    logs = Logs(module)
    logs.begin(1)
    with logs.recording(0), pytest.raises(ValueError, match="got a MeanMetric in training_step"):
        module.log("loss", MeanMetric())
    assert "log" not in vars(module)


def test_batches_that_differ_are_told_apart():
    ids, _, _ = batch()
    assert checksum([ids]) == checksum([ids.clone()])
    assert len({checksum([x]) for x in (ids, ids.roll(1, 0), ids.roll(1, 1), ids + 1)}) == 4


@pytest.mark.thorough
def test_a_measurement_serves_all_shorter_sequences_and_those_without_a_mask():
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
        slices = plans.plan(Planned(), call, pipe, None, lambda: None)
        assert sum(slices) == size[1]
        found.append(plans.profiles)
    assert found[1] is found[0]
    assert found[2] is not found[1]
    assert found[3] is not found[2]
    assert list(plans.slices) == ["2 x 48", "2 x 24", "2 x 56", "1 x 24"]
    masked = Call(call.inputs, torch.ones_like(call.inputs))  # as costly as any of its size, so measured once more
    for asked in (masked, call):
        plans.plan(Planned(), asked, pipe, None, lambda: None)
        found.append(plans.profiles)
    assert "1 x 24, masked" in plans.slices
    assert found[4] is not found[3]
    assert found[5] is found[4]
    assert plans.expected().seconds > 0
    assert {"slices", "bubble", "fit of the costs", "memory"} <= set(plans.summary())


# ---- on a device the host only queues until the step has ended ----------------------------------------------------

META = torch.device("meta")
"""Tensors without values: whoever asks for one gets an error, where a device would make the host wait."""


def test_a_stage_closes_its_micro_batch_without_waiting():
    output = torch.zeros(6, 3, device=META, requires_grad=True)
    targets = torch.zeros(6, dtype=torch.int64, device=META)
    network = SimpleNamespace(parameters=list)
    module = SimpleNamespace(
        parameters=network.parameters,
        training_step=lambda part: functional.cross_entropy(network.forward(part), targets),
    )
    reading = {"read": lambda args, kwargs: Call(args[0]), "answer": lambda call, output: output}
    model = SimpleNamespace(module=network, **reading)
    pipe = SimpleNamespace(model=model, place=StagePlace(0, 1, True, True), device=CPU)
    step = TrainingStep(pipe, module, Logs(module), 1, 1.0)
    step.read(torch.zeros(6, 4))
    loss = step.finish(0, output)
    loss.backward()
    assert output.grad.is_meta
    with step._logs.recording(0):
        step._module.log("seen", loss)


def test_whether_gradients_are_finite_is_asked_once_and_not_by_the_host():
    assert finite([torch.zeros(3, device=META), torch.zeros(2, device=META, dtype=torch.bfloat16)], META).is_meta
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan")], dtype=torch.float64)
    cpu = torch.device("cpu")
    assert [bool(finite(each, cpu)) for each in ([], [good], [good, bad], [good, 1 / torch.zeros(2)])] == [1, 1, 0, 0]


def test_gradients_of_all_types_are_multiplied_as_by_a_number_of_the_host():
    by, found = 12 / 9, [torch.linspace(-3, 3, 7).to(t) for t in (torch.float32, torch.float64, torch.bfloat16)]
    expected = [tensor * by for tensor in found]
    multiply(found, torch.tensor(by, dtype=torch.float64))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    sick = [torch.zeros(2), torch.ones(2)]
    multiply(sick, torch.tensor(torch.inf, dtype=torch.float64))
    assert not any(bool(t.isfinite().any()) for t in sick)


def test_what_a_step_logs_is_what_it_was_then():
    module = SimpleNamespace()
    logs, value = Logs(module), torch.tensor(1.0)
    logs.begin(1)
    with logs.recording(0):
        module.log("kept", value)
        value.add_(1)
        with pytest.raises(RuntimeError):
            module.log("three", torch.ones(3))
    assert float(logs.values[0][0]) == 1.0


@pytest.mark.quick
def test_options_may_be_given_by_position():
    module = Language("llama")
    logs = Logs(module)
    logs.begin(1)
    for keep in (0, None):
        with logs.recording(keep):
            module.log("loss", torch.tensor(3.0), True, on_epoch=True)
            module.log(name="other", value=2.0)
    logged = []
    module.log = lambda name, value, **options: logged.append((name, float(value), options))
    logs.publish(
        logs.signature, [row[0] for row in zip(*logs.values, strict=True)], SimpleNamespace(gather=lambda mine: [mine])
    )
    assert logged == [("loss", 3.0, {"prog_bar": True, "on_epoch": True}), ("other", 2.0, {})]


class Outputs(Language):
    """Its step returns more than a loss; every stage keeps what its hook is given."""

    def __init__(self, folder):
        super().__init__("llama")
        self._folder, self._rows = folder, []

    def training_step(self, batch, batch_idx):
        ids, mask, labels = batch
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        return {"loss": token_mean(logits, labels), "rows": ids.shape[0], "logits": logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._rows.append(outputs)

    def on_train_end(self):
        self._folder.mkdir(exist_ok=True)
        torch.save(self._rows, self._folder / f"{self.global_rank}.pt")


@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_stands_beside_a_loss_is_known_where_the_step_ends(tmp_path, microbatches):
    fit(Outputs(tmp_path / "alone"), alone(), tmp_path / "alone", max_steps=2)
    how = pipeline(2, microbatches=microbatches)
    forked(Outputs(tmp_path / "p"), how, tmp_path / "p", max_steps=2)
    wanted, first, last = (torch.load(tmp_path / name) for name in ("alone/0.pt", "p/0.pt", "p/1.pt"))
    assert all({**row, "loss": 0} == {"loss": 0, "rows": None, "logits": None} for row in first)
    for theirs, ours, there in zip(wanted, last, first, strict=True):
        assert float(ours["loss"]) == float(there["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-9)
        rows, logits = (ours["rows"], ours["logits"]) if microbatches > 1 else ([ours["rows"]], [ours["logits"]])
        assert rows == [3 // microbatches] * microbatches
        assert not any(part.requires_grad for part in logits)
        assert torch.allclose(torch.cat(logits), theirs["logits"], rtol=1e-9)
