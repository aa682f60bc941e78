"""Sweeps: many trainings share devices (`hydra/launcher=shard_parallel`), after Nagrecha's Hydra; JigSaw and SPASE.

`launcher` turns Hydra's overrides into members, `server` runs them in `processes`, `time_slicing` gives each its device
between batches and reports its scores, `eviction` moves its tensors to the host; `progress` and `gantt` show the
sweep; `trainings` runs the jobs of a schedule. `jigsaw` carries out members of several workers, which ask in `pieces`;
`spase` tries members on several devices each, and carries out the plan (`plan/spase`, `plan/allocation`).

    member     one training of a sweep: overrides, a folder, a record (`member.SweepMember`); its process has a `Gate`,
               whose `Seat` asks for the device; the scheduler keeps a `MemberAccount` of it
    job        what a policy chooses among: a member as `policy.Job`, or without a process a `Queue` of a simulation
    training   an entry of a jobs file that is a real training (`jobs_file.Training`): `trainings` makes it a member

"A member starves": `plan/policy` (who is next), `plan/arbiter` (who may run), `server` (its messages), `wire/client`
(its wait). Below: `plan` (who is next, who ends: values without torch), `wire` (the two ends of the socket). Public:
all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.sweep.plan.dispatch import Queue as Queue
    from lightning_decentral.sweep.plan.dispatch import WorkPiece as WorkPiece
    from lightning_decentral.sweep.plan.dispatch import devices as devices
    from lightning_decentral.sweep.plan.gangs import ComplementaryPairing as ComplementaryPairing
    from lightning_decentral.sweep.plan.gangs import LatinSquare as LatinSquare
    from lightning_decentral.sweep.plan.gangs import staircase as staircase
    from lightning_decentral.sweep.plan.policy import ASHA as ASHA
    from lightning_decentral.sweep.plan.policy import FIFO as FIFO
    from lightning_decentral.sweep.plan.policy import LRTF as LRTF
    from lightning_decentral.sweep.plan.policy import SRTF as SRTF
    from lightning_decentral.sweep.plan.policy import Complementary as Complementary
    from lightning_decentral.sweep.plan.policy import Job as Job
    from lightning_decentral.sweep.plan.policy import Policy as Policy
    from lightning_decentral.sweep.plan.policy import RoundRobin as RoundRobin
    from lightning_decentral.sweep.plan.simulation import makespan_seconds as makespan_seconds
    from lightning_decentral.sweep.plan.simulation import mean_completion_seconds as mean_completion_seconds
    from lightning_decentral.sweep.plan.simulation import simulate as simulate
    from lightning_decentral.sweep.plan.spase import GreedySpase as GreedySpase
    from lightning_decentral.sweep.plan.spase import Table as Table

__getattr__, __all__ = lazy_exports(__name__)
