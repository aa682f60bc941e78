"""Parameter offload (spilling): a block runs on copies of its parameters, which live on the host.

    forward    y = block(x; copy of w), whose graph is dropped;    x and the random state go to the host
    backward   y = block(x; copy of w) again, with a graph, then  dx, dw = vjp(dy);    dw goes to the host

Autograd sees the host's parameters: gradients accumulate and hooks run as if nothing had been copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_decentral.spilled.compute import blocks as block_places
from lightning_decentral.spilled.compute.blocks import ParameterPlace, placed
from lightning_decentral.spilled.compute.prefetch import Loader
from lightning_decentral.spilled.compute.recompute import (
    GivenObjects,
    Moment,
    Taken,
    as_trained,
    first_order,
    graph_dropped,
)
from lightning_decentral.spilled.compute.transfer import Copies

TOLERANCE = 1e-3
PLAIN = (bool, int, float, str, type(None))  # types that a block may return in addition to tensors


@dataclass(frozen=True)
class Spilling:
    """Block of a module: its original call, and the places of its parameters."""

    index: int
    name: str
    module: nn.Module
    places: tuple[ParameterPlace, ...]
    # Identities of caches to which the block wrote, and which were restored.
    emptied: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary, compare=False)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.name for place in self.places))


def spilled(block: Spilling, loader: Loader) -> Callable[..., Any]:

    def call(*args: Any, **kwargs: Any) -> Any:
        given = Taken((args, kwargs))
        # A cache that returns in a training step is empty, but the caller expects content.
        again = [other for other in given.others if block.emptied.get(id(other), block) is other]
        if again:
            raise ValueError(
                f"block {block.name} gets the same {type(again[0]).__name__} again, which is as empty as before the "
                "training step: pass no cache (use_cache=False)"
            )
        run = Run(block, loader, given)
        block_places.as_standing(block.places, loader.hosts)
        hosts = [loader.hosts[name] for name in block.parameters]
        inputs = given.drop()
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*hosts, *inputs)):
            return run.once(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            raise ValueError(
                f"block {block.name} is differentiated by torch.func or in forward mode, but it runs again in the "
                "backward, which supports neither: use loss.backward(), or train without strategy='spilled'"
            )
        token = _Parameters.apply(run, *hosts)  # type: ignore[no-untyped-call]
        return run.reply(_Computed.apply(run, token, *inputs))  # type: ignore[no-untyped-call]

    return call


class Run:
    """One call of a block, with what its backward needs; of the arguments only the structure is kept."""

    def __init__(self, block: Spilling, loader: Loader, given: Taken) -> None:
        self._block, self._loader, self._given = block, loader, given
        self._kept: Copies | None = None
        self._arriving: Copies | None = None
        self._gradients = list[str](), Copies([])
        self._seen: list[Tensor] = []  # results of the first run on the host, in a checked step

    def once(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block when no backward follows; it may change its inputs."""
        copies = self._loader.enter(self._block.index)
        before = block_places.versions(copies)
        with placed(self._block.places, copies):
            answer = self._block.module._call_impl(*args, **kwargs)
        self._refuse_written(copies, before)
        return answer

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:  # any shapes: the distinct tensors given
        loader, came = self._loader, [tensor._version for tensor in inputs]
        copies = loader.enter(self._block.index)
        place = loader.device.place
        self._wanted = [tensor.requires_grad for tensor in inputs]
        # Tensors that aren't on the device stay where they are; the others are sent to the host.
        self._elsewhere = {i: tensor.detach() for i, tensor in enumerate(inputs) if tensor.device != place}
        self._kept = loader.send([tensor for tensor in inputs if tensor.device == place])
        self._moment = Moment(self._block.module, loader.device)
        args, kwargs = self._given.with_tensors(inputs)
        self._objects = GivenObjects((args, kwargs), inputs)
        if self._objects.unreached:
            raise ValueError(
                f"block {self._block.name} gets a {self._objects.unreached[0]} with tensors that need gradients, but "
                "they would get none: pass them in lists or dictionaries, and no cache (use_cache=False)"
            )
        self._trained = {name: loader.hosts[name].requires_grad for name in copies}
        leaves, before = as_trained(copies, self._trained), block_places.versions(copies)
        with placed(self._block.places, leaves), graph_dropped(self._block.name, leaves.values()):
            self._answer = Taken(self._block.module._call_impl(*args, **kwargs))
        self._refuse_written(copies, before)
        self._check_objects()
        if any(tensor._version != version for tensor, version in zip(inputs, came, strict=True)):
            raise ValueError(
                f"block {self._block.name} changes its input in place, but its backward needs the original: "
                "use operations that make a new tensor (inplace=False)"
            )
        self._moment.seal()
        loader.runs.append(self)
        given = set(map(id, inputs))  # autograd sees an input that is returned; views can't lose their graph in place
        dropped = lambda t: t if id(t) in given else t.detach() if t._is_view() else t.detach_()  # noqa: E731
        results = tuple(map(dropped, self._answer.drop()))
        self._seen = loader.device.send(results).land() if loader.checks else []
        return results

    def reply(self, results: Sequence[Tensor]) -> Any:
        """Return the block's output, built with these tensors."""
        return self._answer.with_tensors(results)

    def _check_objects(self) -> None:
        """Restore caches to before the call, so the device needn't keep what the block wrote. ValueError for other
        objects that it wrote to, and for results in which gradients can't be found."""
        caches, others = self._objects.put_back()
        self._block.emptied.update((id(cache), cache) for cache in caches)
        if others:
            raise ValueError(
                f"block {self._block.name} writes into a {others[0]} among its arguments, but its backward needs the "
                "original: return new values as tensors, and pass no cache (use_cache=False)"
            )
        wrong = [other for other in self._answer.others if not isinstance(other, PLAIN)]
        if wrong:
            raise ValueError(
                f"block {self._block.name} returns a {type(wrong[0]).__name__}, in which gradients can't be found: "
                "return tensors, or lists, tuples and dictionaries of them"
            )

    def _refuse_written(self, copies: Mapping[str, Tensor], before: Mapping[str, int]) -> None:
        hosts = {name: self._loader.hosts[name] for name in copies} if self._loader.checks else {}
        block_places.refuse_written(f"block {self._block.name}", copies, before, hosts)

    def prefetch(self) -> None:
        if self._arriving is None and self._kept is not None:
            self._arriving = self._loader.device.fetch(self._kept.land())

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of the inputs; gradients of the parameters are being sent to the host."""
        if self._kept is None:
            raise RuntimeError(
                f"a second backward through block {self._block.name}, whose inputs the first backward used up: "
                "run one backward for each forward (no retain_graph)"
            )
        copies = self._loader.enter(self._block.index, self)
        hosts = self._loader.hosts
        leaves = as_trained(copies, self._trained)
        inputs = self._inputs()
        with placed(self._block.places, leaves):
            results = zip(self._again(inputs), gradients, strict=True)
            if pairs := [(r, g) for r, g in results if r.requires_grad and g is not None]:
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        self._gradients = list(found), self._loader.send(list(found.values()), [hosts[name] for name in found])
        return [tensor.grad for tensor in inputs]

    def _inputs(self) -> list[Tensor]:
        self.prefetch()
        assert self._arriving is not None
        arrived, elsewhere = iter(self._arriving.ready()), self._elsewhere
        self._kept = self._arriving = None
        tensors = [elsewhere[i] if i in elsewhere else next(arrived) for i in range(len(self._wanted))]
        return [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self._wanted, strict=True)]

    def _again(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the block again and return its results' tensors, with a graph."""
        try:
            with self._moment.again(), self._objects.again(), torch.enable_grad():
                args, kwargs = self._given.with_tensors(inputs)
                answer = Taken(self._block.module._call_impl(*args, **kwargs))
        except torch.OutOfMemoryError:  # a RuntimeError, too, but not caused by the block
            raise
        except RuntimeError as error:
            raise self._unlike(f" ({error})") from error
        if self._loader.log is not None:
            self._loader.log.ran_again()
        results, seen = answer.drop(), self._seen
        again = self._loader.device.send(results).land() if self._loader.checks else []
        # Equal, up to rounding on a device that adds in no fixed order.
        alike = partial(torch.allclose, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        if [a.shape for a in seen] != [b.shape for b in again] or not all(map(alike, seen, again)):
            raise self._unlike("")
        self._seen = []
        return results

    def _unlike(self, reason: str) -> ValueError:
        return ValueError(
            f"block {self._block.name} gives another result when its backward runs it again{reason}. Keep its state "
            "between calls in its own buffers, numbers or lists, not in iterators, files or other objects; draw from "
            "its own generators; pass no cache (use_cache=False)"
        )

    def landed(self) -> list[Tensor | None]:
        """Gradients of the parameters, on the host; the caller owns them alone."""
        (names, leaving), self._gradients = self._gradients, ([], Copies([]))
        found = dict(zip(names, leaving.land(), strict=True))
        return [found.pop(name, None) for name in self._block.parameters]


class _Parameters(torch.autograd.Function):
    """Links the host's parameters to a token, so that their gradients may arrive while the device continues."""

    @staticmethod
    def forward(ctx: Any, run: Run, *hosts: Tensor) -> Tensor:
        ctx.run = run
        return torch.zeros(())  # (), on the host: the token

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.run.landed()


class _Computed(torch.autograd.Function):
    """Runs a block, linked to its parameters by a token, and to its inputs."""

    @staticmethod
    def forward(ctx: Any, run: Run, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)  # no zeros on the device for results that the loss doesn't use
        results = run.forward(inputs)
        ctx.mark_non_differentiable(*(t for t in results if not (t.is_floating_point() or t.is_complex())))
        return results

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, torch.zeros(()), *ctx.run.backward(gradients)
