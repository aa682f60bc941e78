"""Kernels compile for devices that aren't here, load and store once, and give the bits of torch's operations."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_decentral.shared.compute import fused

triton = pytest.importorskip("triton", reason="Triton is for Linux")
NAME = "lightning_decentral.shared.compute.triton_kernels"


@pytest.mark.thorough
def test_they_give_the_bits_of_torch() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        Path(__file__).with_name("interpreted_kernels.py"),
    ]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 50


FLOAT, BLOCKS = "*fp32", {"BLOCK": 1024}
HEARD = {"sent": FLOAT, **{f"h{i}": FLOAT for i in range(4)}, "sane": "*i1", **{f"w{i}": "fp32" for i in range(4)}}
CODES = {"quantized": "*i8", "scales": FLOAT, "n": "i64", "columns": "i32"}
# (arguments, constants, warps, loads and stores of a thread that has eight elements)
KERNELS = {
    "correct_kernel": ({"x": FLOAT, **HEARD, "rate": "fp32", "n": "i64"}, {"COUNT": 1, **BLOCKS}, 4, 24 + 1, 8),
    "correct_and_copy_kernel": (
        {"out": FLOAT, "parts": FLOAT, "x": FLOAT, **HEARD, "rate": "fp32", "n": "i64"}, {"COUNT": 1, **BLOCKS}, 4,
        24 + 1, 16 + 1,
    ),
    "difference_kernel": ({"out": FLOAT, **HEARD, "n": "i64"}, {"COUNT": 2, **BLOCKS}, 4, 24 + 2, 8),
    "copy_kernel": ({"out": FLOAT, "message": FLOAT, "parts": FLOAT, "n": "i64"}, BLOCKS, 4, 8, 8 + 1),
    "header_kernel": (
        {"header": "*i64", "parts": FLOAT, "step": "i32", "elements": "i64", "count": "i32"}, {"PARTS": 1024}, 4, 8, 3,
    ),
    "judge_kernel": (
        {"sane": "*i1", "headers": "*i64", "count": "i32"}, {"MOST": 1e299, "FACTOR": 1e9, "HEADERS": 32}, 4, None, 1,
    ),
    "encode_kernel": (
        {"message": FLOAT, **CODES, "midpoints": FLOAT, "key": "i32", "piece": "i32"},
        {"COLUMNS": 256, "REPLACE": True}, 1, 8 + 8, 8 + 8 + 1,
    ),
    "decode_kernel": ({"out": FLOAT, **CODES, "count": "i32"}, {"ROWS": 4, "COLUMNS": 256}, 4, 8 + 4, 8),
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_and_goes_over_its_tensors_once(name: str, capability: int) -> None:
    """For devices that aren't here; no multiplication and addition became one, which would round otherwise."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(NAME), name)
    arguments, constants, warps, loads, stores = KERNELS[name]
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, {p.name: signature[p.name] for p in kernel.params}, constants)
    target = GPUTarget("cuda", capability, 32)
    options = {"enable_fp_fusion": False, "num_warps": warps}
    assembly = triton.compile(source, target=target, options=options).asm
    assert len(assembly["cubin"]) > 1000
    assert len(re.findall(r"st\.global", assembly["ptx"])) == stores
    assert loads is None or len(re.findall(r"ld\.global", assembly["ptx"])) == loads
    assert not re.search(r"fma\.rn\.f(16|32)", assembly["ptx"])


def test_without_triton_torch_does_it_and_says_so() -> None:
    fused.kernels.cache_clear()
    try:
        with (
            mock.patch.object(importlib, "import_module", side_effect=ImportError("no triton")),
            pytest.warns(UserWarning, match=r"Triton doesn't work here \(ImportError: no triton\)"),
        ):
            assert fused.kernels(torch.device("cuda", 0)) is None
    finally:
        fused.kernels.cache_clear()
