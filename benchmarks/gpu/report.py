"""The page of what `gpu.py` measured."""

import statistics
from typing import Any


def page(result: dict[str, Any]) -> str:
    """Return the result as a Markdown page."""
    about = "\n".join(f"- {name}: {value}" for name, value in result["hardware"].items())
    rows = [
        f"| {name} | {1e3 * statistics.median(row['seconds']['plain']):.2f} | "
        f"{1e3 * statistics.median(row['seconds']['gossip']):.2f} | {row['ratio']:.3f} |"
        for name, row in result["binding"].items()
    ]
    rates = [
        f"| {name} | {parts['send']:.1f} | {parts['hear']:.1f} |" if "hear" in parts
        else f"| {name} (reads and writes) | {parts['send']:.1f} | |"
        for name, parts in result["codecs"]["GB/s"].items()
    ]  # fmt: skip
    staged = result["staging"]
    numbers = ", ".join(f"{name} {1e3 * staged[name]:.2f} ms" for name in ("computing", "exchange", "both"))
    return f"""# Gossip on one device

Made by `python benchmarks/gpu.py`; every turn is in the JSON file.

{about}

## The binding: one worker, bf16, milliseconds per step

| model | plain | gossip | ratio |
| --- | --- | --- | --- |
{chr(10).join(rows)}

## Codecs: gigabytes of message per second ({result["codecs"]["message bytes"] / 1e6:.0f} MB)

| codec | send | hear |
| --- | --- | --- |
{chr(10).join(rates)}

## Staging through pinned host memory ({staged["message bytes"] / 1e6:.0f} MB, two workers on the device)

{numbers}; hidden {staged["hidden"]:.2f}. A message in flight holds {staged["copies"]:.2f} messages on the device.
"""
