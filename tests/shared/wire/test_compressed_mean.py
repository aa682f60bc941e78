"""The compressed mean over the wire equals its formula, computed worker by worker in one process."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec import (
    BFloat16,
    DifferenceCompression,
    Frame,
    Int2,
    Int4,
    Int8,
    Plain,
    TopK,
)
from lightning_decentral.shared.compute.codec.blocks import key
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.coded_parts import GRAIN
from lightning_decentral.shared.wire.compressed_mean import CompressedMean, mean_by
from lightning_decentral.shared.wire.transport import GlooTransport, Transport
from tests.world import world

HOST = torch.device("cpu")
LENGTHS = (3 * GRAIN + 77, 5)
CODECS = [Int8(), Int8(block=7), Int4(block=16), Int2(block=16), BFloat16(), TopK(fraction=0.25, block=16)]
pytestmark = pytest.mark.threads


def gradients(size: int, steps: int) -> list[list[list[Tensor]]]:
    """[step][worker][place]"""
    generator = torch.Generator().manual_seed(3)
    return [[[torch.randn(n, generator=generator) for n in LENGTHS] for _ in range(size)] for _ in range(steps)]


def coded(codec: Codec, x: Tensor, noise: int) -> Tensor:
    """Q(x)"""
    out = torch.empty_like(x)
    payload = [torch.empty(p.elements, dtype=p.dtype) for p in codec.parts(len(x), x.dtype)]
    codec.encode(x, payload, Frame(noise))
    codec.decode(payload, out, Frame())
    return out


def expected(codec: Codec, given: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """[step][place]: the module's formula, without parts in flight, threads or messages."""
    size = len(given[0])
    e = [[torch.zeros(n) for n in LENGTHS] for _ in range(size)]
    f = [torch.zeros(n) for n in LENGTHS]
    means = []
    for step, rows in enumerate(given):
        out = []
        for place, length in enumerate(LENGTHS):
            each = -(-length // (size * GRAIN)) * GRAIN
            mean = torch.empty(length)
            for owner in range(size):
                span = slice(min(length, each * owner), min(length, each * (owner + 1)))
                if span.start == span.stop:
                    continue
                total = (rows[owner][place][span] + e[owner][place][span]) * (1 / size)  # its own, as it is
                for i in range(size):
                    if i != owner:
                        x = rows[i][place][span] + e[i][place][span]
                        q = coded(codec, x, key(i, step, place, owner, 0))
                        e[i][place][span] = x - q
                        total = torch.add(total, q, alpha=1 / size)
                s = total + f[place][span]
                r = coded(codec, s, key(owner, step, place, owner, 1))
                f[place][span] = s - r
                mean[span] = r
            out.append(mean)
        means.append(out)
    return means


def run(codec: Codec, given: list[list[list[Tensor]]]) -> list[list[list[Tensor]]]:
    """[worker][step][place] of the wire."""

    def worker(group: Any) -> list[list[Tensor]]:
        mean = mean_by(codec, groups(group), HOST)
        return [averaged(mean, [t.clone() for t in row[group.rank()]]) for row in given]

    return world(len(given[0]), worker)


def groups(group: Any) -> Any:
    """Transports that don't meet each other: a tag is one of both ways."""
    numbers = itertools.count(1)
    return lambda: _Tagged(group, next(numbers))


class _Tagged(GlooTransport):
    def __init__(self, group: Any, number: int) -> None:
        super().__init__(group)
        self._offset = 1000 * number

    def exchange(self, sends: Any, receives: Any) -> Any:
        shifted = [[m._replace(tag=m.tag + self._offset) for m in rows] for rows in (sends, receives)]
        return super().exchange(*shifted)


def averaged(mean: Any, flats: list[Tensor]) -> list[Tensor]:
    pending = [mean.start(flat, place) for place, flat in enumerate(flats)]
    for one in pending:
        one.wait()
    return flats


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_wire_is_the_formula_on_every_worker(codec: Codec, size: int) -> None:
    given = gradients(size, steps=3)
    means = expected(codec, given)
    for row in run(codec, given):
        for step, tensors in enumerate(row):
            for place, tensor in enumerate(tensors):
                torch.testing.assert_close(tensor, means[step][place], rtol=1e-5, atol=1e-6)


def test_all_workers_get_the_same_bits() -> None:
    first, *others = run(Int8(), gradients(3, steps=4))
    for other in others:
        assert all(torch.equal(a, b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))


def test_plain_is_the_all_reduce() -> None:
    given = gradients(2, steps=1)
    rows = run(Plain(), given)
    for place in range(len(LENGTHS)):
        assert torch.equal(rows[0][0][place], (given[0][0][place] / 2 + given[0][1][place] / 2))


@pytest.mark.parametrize("codec", [Int8(), TopK(fraction=0.25, block=16)], ids=str)
def test_what_is_rounded_away_comes_later(codec: Codec) -> None:
    """The sum over steps of a constant gradient: its error stays that of a step or few, however many are taken."""
    steps = 60
    given = gradients(2, steps=1) * steps
    exact = [sum(worker[place] for worker in given[0]) / 2 for place in range(len(LENGTHS))]
    (row, _) = run(codec, given)
    for place, mean in enumerate(exact):
        error = torch.stack([row[step][place] for step in range(steps)]).sum(0) - steps * mean
        assert error.norm() < 12 * mean.norm(), "lost for good it would be about a half of the 60"


@pytest.mark.parametrize("sick", [float("nan"), float("inf")])
def test_an_overflow_reaches_all_and_is_forgotten(sick: float) -> None:
    given = gradients(2, steps=3)
    given[1][1][0][-1] = sick
    for row in run(Int8(), given):
        assert not row[1][0].isfinite().all()
        assert all(t.isfinite().all() for step in (0, 2) for t in row[step])


def test_it_goes_on_from_its_state() -> None:
    given = gradients(2, steps=4)

    def resumed(group: Any) -> list[list[Tensor]]:
        make, rank = groups(group), group.rank()
        first = mean_by(Int8(), make, HOST)
        before = [averaged(first, [t.clone() for t in row[rank]]) for row in given[:2]]
        second = mean_by(Int8(), make, HOST)
        second.load_state_dict(first.state_dict())
        return before + [averaged(second, [t.clone() for t in row[rank]]) for row in given[2:]]

    for row, other in zip(run(Int8(), given), world(2, resumed), strict=True):
        assert all(torch.equal(a, b) for x, y in zip(row, other, strict=True) for a, b in zip(x, y, strict=True))


def test_bytes_are_those_of_an_all_reduce_of_codes() -> None:
    length, size, sent = 64 * GRAIN, 4, []

    class Counting(_Tagged):
        def exchange(self, sends: Any, receives: Any) -> Any:
            sent.extend(m.tensor.numel() * m.tensor.element_size() for m in sends)
            return super().exchange(sends, receives)

    def worker(group: Any) -> None:
        mean = CompressedMean(Int8(), Counting(group, 1), Counting(group, 2), HOST)
        mean.start(torch.ones(length), 0).wait()

    world(size, worker)
    codes = sum(p.bytes for p in Int8().parts(length, torch.float32))
    assert sum(sent) / size == pytest.approx(2 * (size - 1) / size * codes)


def test_codecs_of_differences_are_refused() -> None:
    with pytest.raises(ValueError, match="give the inner codec by itself"):
        mean_by(DifferenceCompression(Int8()), _none, HOST)


def _none() -> Transport:
    raise AssertionError("refused before")
