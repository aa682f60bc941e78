"""Which buffers have a mean: by the shapes that statistics, queues, codebooks and averages of weights have."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize

from lightning_decentral.shared.compute.carried import carried, carried_of


def holding(**buffers: Tensor | None) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def whole_number(size: int = 1) -> Tensor:
    return torch.zeros(size, dtype=torch.long)


ONE_WORKERS: dict[str, Callable[[], nn.Module]] = {
    "queue and pointer": lambda: holding(queue=torch.randn(4, 8), queue_ptr=whole_number()),
    "queue that shifts, no pointer": lambda: holding(queue=torch.randn(8, 4)),
    "memory of numbers and pointer": lambda: holding(memory=torch.zeros(9), pointer=torch.tensor(0)),
    "codebook with counts": lambda: holding(
        embed=torch.randn(6, 4), cluster_size=torch.zeros(6), embed_avg=torch.randn(6, 4)
    ),
    "centres and whether they are drawn": lambda: holding(centres=torch.zeros(5), drawn=torch.tensor(False)),
    "replay memory with labels": lambda: holding(rows=torch.zeros(7, 3), labels=whole_number(7)),
    "complex rows": lambda: holding(rows=torch.zeros(7, 3, dtype=torch.complex64)),
}

STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "fake quantization": FakeQuantize,
    "running covariance": lambda: holding(running_covariance=torch.eye(4), running_mean=torch.zeros(4)),
    "a number": lambda: holding(best=torch.zeros(())),
    "moments": lambda: holding(mean=torch.zeros(3), variance=torch.ones(3), seen=torch.zeros(())),
    "a centre": lambda: holding(centre=torch.zeros(1, 9)),
    "none": lambda: holding(last=None),
}


@pytest.mark.parametrize("kind", ONE_WORKERS)
def test_what_belongs_together_is_one_workers(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), ONE_WORKERS[kind](), nn.BatchNorm1d(2))
    own = dict(module[1].named_buffers(prefix="1"))
    assert list(carried(module)) == list(own)
    assert all(found is own[name] for name, found in carried(module).items())


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_are_averaged(kind: str) -> None:
    assert carried(nn.Sequential(nn.Linear(2, 2), STATISTICS[kind]())) == {}


@pytest.mark.parametrize("prefix", ["", "ema_", "net_"])
def test_averages_of_weights_kept_as_buffers_are_averaged(prefix: str) -> None:
    module = nn.ModuleDict({"net": nn.Linear(3, 2)})
    kept = {f"{prefix}{name}": p.detach().clone() for name, p in module["net"].named_parameters()}
    module["average"] = holding(**kept, updates=torch.tensor(0))
    assert list(carried(module)) == ["average.updates"]  # a queue of the same shape is none of a parameter's
    module["queue"] = holding(queue=torch.zeros(2, 3))
    assert list(carried(module)) == ["average.updates", "queue.queue"]


def test_a_frozen_parameter_goes_with_its_pointer() -> None:
    module = holding(pointer=whole_number())
    module.register_parameter("queue", nn.Parameter(torch.zeros(4, 2), requires_grad=False))
    module.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert list(carried(module)) == ["pointer", "queue"]


@pytest.mark.parametrize(("given", "names"), [(True, []), (False, ["rows", "more"])])
def test_the_module_decides(given: bool, names: list[str]) -> None:
    module = holding(rows=torch.zeros(4, 2), more=torch.zeros(2))
    module.buffers_averaged = given
    assert list(carried(module)) == names


def test_any_other_word_is_refused() -> None:
    module = holding(rows=torch.zeros(4, 2))
    module.buffers_averaged = "mean"
    with pytest.raises(ValueError, match="buffers_averaged of Module must be True or False, got 'mean'"):
        carried(module)


def test_a_tensor_of_two_modules_is_one() -> None:
    queue = holding(queue=torch.zeros(3, 3))
    assert len(carried(nn.Sequential(queue, queue))) == 2  # both names are in a state_dict
    assert len(carried_of([nn.Sequential(queue, queue), queue])) == 1
