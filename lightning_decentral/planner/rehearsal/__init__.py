"""Trains n workers in one process, before there is a cluster, and reports which method reaches a loss fastest.

`crew` trains them under one strategy: a `worker` is Lightning's own Trainer in a thread, whose strategy (`binding`)
takes its part, a `member`, from `rehearsed_strategies`. One has its turn (`turns`) on its copy of the data, or
gradients are computed some at a time, where that is faster. `jobs` are methods on so many workers, one by one;
`search` finds a learning rate for each by the losses of `evaluation`. `excess_loss` predicts what gossip's workers
lose by it, `answer` joins steps with the planner's seconds, `rehearse` keeps to the minutes.

One that differs from the real run: first the rounds (`rehearsed_strategies`, `member`), then what Lightning is given
(`binding`, `loop_settings`), the data's copies (`worker`), the order of sums (`crew`), random numbers and threads
(`turns`).
Public: `rehearse`.
"""

from lightning_decentral.planner.rehearsal.answer import Answer, Reached
from lightning_decentral.planner.rehearsal.rehearse import rehearse

__all__ = ["Answer", "Reached", "rehearse"]
