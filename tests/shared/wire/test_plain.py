"""The plain encoding: what it gives back, what it refuses to send, what it does with what it can't read."""

import argparse
import json
import math
import pickle
import re
from collections import OrderedDict, defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_decentral.pipeline.logs import Logged
from lightning_decentral.pipeline.plan.cost import Link
from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.wire.plain import NotPlain, Serialized, lengths, pack, unpack


def there_and_back(value: Any) -> Any:
    packed = pack(value)
    assert lengths(packed.head) == [len(p) for p in packed.payload]
    return unpack(Serialized(packed.head, [p.clone() for p in packed.payload]))


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    return bool(a == b or (a != a and b != b))


PRIMITIVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PRIMITIVES,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=150)
def test_primitives_and_containers_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", [
    Path("a") / "b",
    OrderedDict(b=1, a=2),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    timedelta(days=-1, microseconds=7),
    math.inf,
    np.float32(0.1),
    np.bool_(True),
    np.arange(6, dtype=np.uint32).reshape(2, 3),
    [torch.sum, max],
    Action(Kind.BACKWARD, 1, 2, 3),
    {Action(Kind.FORWARD, 0, 0, 0): Span("stage 0", 0.5, 1.5)},
    Link(),
    Logged("loss", {"on_step": True, "reduce_fx": "mean", "batch_size": None}),
    {"keys": [1, 2], "tuple": {"tensor": [0]}},  # names of kinds are names like others
    {"lr": [1e-8, 1e-7], "loss": [math.nan, 2.0]},  # Lightning's learning rate finder
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_other_kinds_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 2), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert same(there_and_back({"a": (tensor, 1)}), {"a": (tensor, 1)})


def test_tensors_that_are_views_or_parameters_come_back_as_plain_ones() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert same(there_and_back(whole.T), whole.T)
    assert same(there_and_back(nn.Parameter(whole)), whole)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert there_and_back(conjugate).tolist() == [1 - 2j]


def test_what_a_worker_saves_comes_back() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = {"optimizers": [optimizer.state_dict()], "random": worker_state.random_state()}
    assert same(there_and_back(state), state)


class Own:
    """Of a user."""


@pytest.mark.parametrize(("value", "line"), [
    ({"a": [1, Own()]}, r"a tests\.shared\.wire\.test_plain\.Own, which isn't sent"),
    (defaultdict(int), "a collections.defaultdict, which"),
    (lambda: 0, "function"),
    (argparse.Namespace(), "argparse.Namespace"),
    (torch.ones(2).to_sparse(), "without plain values"),
    (torch.ones(2, device="meta"), "without plain values"),
    (np.array([Own()]), "ndarray"),
    (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
])  # fmt: skip
def test_anything_else_is_refused_by_name_where_it_would_be_sent(value: Any, line: str) -> None:
    with pytest.raises(TypeError, match=line):
        pack(value)


def test_the_place_of_what_is_refused_is_named() -> None:
    with pytest.raises(NotPlain, match=r"^it\[0\]\.options.* is a "):
        pack([Logged("x", {"reduce_fx": Own()})])


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("executed",))


def head(tree: Any) -> bytes:
    return json.dumps({"value": tree, "bytes": []}).encode()


@pytest.mark.parametrize("garbage", [
    b"", b"\x80\x04", b"{}", b"[]", b"null", b"[" * 100_000, pickle.dumps(Bomb()),
    head({"tensor": ["float32", [3], 0]}),
    head({"tensor": ["load", [], 0]}),
    head({"dtype": "load"}),
    head({"function": "os.system"}),
    head({"unknown": 1}),
    head({}),
    head({"dict": [[1]]}),
    head({"record": ["os", "system", {}]}),
    head({"record": ["subprocess", "Popen", {"args": "false"}]}),
    head({"record": ["lightning_decentral.cli.main", "main", {}]}),
    head({"record": ["lightning_decentral.shared.wire.plain", "Path", {}]}),
    head({"record": ["lightning_decentral.shared.plan.timeline", "Span", {"worker": "w"}]}),
    head({"member": ["lightning_decentral.pipeline.plan.schedule", "Action", "FORWARD"]}),
    head({"array": ["O", [1], 0]}),
    head({"scalar": ["O", {"bytes": "AAAAAAAAAAA="}]}),
], ids=lambda garbage: repr(garbage[:60]))  # fmt: skip
def test_garbage_is_one_clear_error(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="a value from another worker can't be read"):
        unpack(Serialized(garbage, []))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_that_error(data: bytes) -> None:
    for read in (lengths, lambda head: unpack(Serialized(head, []))):
        with suppress(ValueError):
            read(data)


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_a_tensor_of_other_bytes_than_it_should_have_is_that_error(size: int) -> None:
    packed = pack(torch.ones(1))
    with pytest.raises(ValueError, match="can't be read"):
        unpack(packed._replace(payload=[torch.zeros(size, dtype=torch.uint8)]))


def test_a_payload_is_not_copied() -> None:
    """Gigabytes are sent from where they are."""
    tensor = torch.ones(1000)
    assert pack({"a": tensor}).payload[0].data_ptr() == tensor.data_ptr()


# What Lightning broadcasts, by the words of its source, and such a value.
BROADCAST: dict[str, Any] = {
    "file_exists": True,
    "self.already_saved": False,
    "dirpath": "a/checkpoints",
    "path": Path("a"),
    "skip_time": True,
    "should_stop": False,
    "trainer.should_stop": False,
    "ckpt_path": "a/.lr_find_0.ckpt",
    "lr_finder.results": {"lr": [1e-8, 1e-7], "loss": [2.5, 1.5]},
    "filepath": Path("a") / "b.ckpt",
    "checkpoint_path": None,
    "obj": "whatever a user's Fabric broadcasts",
}


def test_whatever_lightning_broadcasts_comes_back() -> None:
    root = Path(lightning.__file__).parent
    texts = [path.read_text() for path in root.rglob("*.py")]
    found = {name for text in texts for name in re.findall(r"(?:strategy|self)\.broadcast\(([\w.]+)[,)]", text)}
    assert "dirpath" in found
    assert found <= set(BROADCAST), "Lightning broadcasts something new: add such a value"
    assert all(same(there_and_back(value), value) for value in BROADCAST.values())
