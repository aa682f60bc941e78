"""Trains n workers in one process, before there is a cluster, and reports which method reaches a loss fastest.

`crew` trains them under one strategy: a `worker` is Lightning's own Trainer in a thread, whose strategy (`binding`)
calls a `member`, the worker's side of the rehearsed strategy (`rehearsed_strategies`). Workers take turns (`turns`), or
several compute gradients at the same time. A job (`jobs`) is a method on a number of workers; `search` finds its
learning rate by the losses of `evaluation`. `excess_loss` predicts how much higher losses gossip's workers have than
their mean, `answer` multiplies steps by predicted seconds, `rehearse` runs all jobs.

A rehearsal that differs from the real run: look at the rounds (`rehearsed_strategies`, `member`), Lightning's settings
(`binding`, `loop_settings`), the data's copies (`worker`), the order of sums (`crew`), random numbers (`turns`).
Public: `rehearse`."""

from lightning_decentral.planner.rehearsal.answer import Answer, Reached
from lightning_decentral.planner.rehearsal.rehearse import rehearse

__all__ = ["Answer", "Reached", "rehearse"]
