"""Forecast of a gossip step's seconds, where a worker waits only for messages that neighbours sent `delay` steps ago.

    update_i(k)   = ready_i(k-1) + compute_i(k)
    launch_i(k)   = max(update_i(k), finish_i(k - delay)) + work_i(k)
                                                             correct, copy or encode, decode, mix: all of it, though on
                                                             a CPU most of it overlaps, if processors are free
    depart_i(k)   = max(launch_i(k), finish_i(k-1))          a round is sent when the round before has arrived,
                                                             except a short last bucket, which is ignored here
    finish_i(k)   = max(depart_j(k) for j = i and all sources of i) + exchange_i(k)
    ready_i(k)    = launch_i(k), with delay 0 finish_i(k)

A round sends one fragment of the model, if it has several, and mixed optimizer states follow the parameters. By this
max-plus recursion over steps a straggler delays its neighbours `delay` steps later, and their neighbours after that.

Source: Wang et al. 2410.11998 (the recursion takes the place of the barrier)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np

from lightning_decentral.gossip.plan import planned_traffic
from lightning_decentral.gossip.plan.planned_traffic import Cliques, Round, RoundLoad
from lightning_decentral.gossip.plan.step_costs import PLAIN, Alone, Encoding, StateMessage, Talk, Within, joined
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights, most_in_flight
from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.forecast import COUNTED_STEPS, Floats, Method, Setting, at_factors
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.timeline import Task, makespan, run

NO_WORK = np.zeros(1)


def ready(
    compute: Floats, exchange: Sequence[Floats], plan: Sequence[Round], delay: int, work: Sequence[Floats] = (NO_WORK,)
) -> Floats:
    """Times at which each worker is ready for its next step, [runs, steps, size]. `compute` is [runs, steps, size]
    seconds, `exchange` and `work` are [size] seconds for each step of the period; `work` may be [1] for all workers."""
    runs, steps, size = compute.shape
    now = link = np.zeros((runs, size))
    found = np.empty_like(compute)
    finished: list[Floats] = []
    for step in range(steps):
        phase = step % len(plan)
        launch = now + compute[:, step]
        if 0 < delay <= step:
            launch = np.maximum(launch, finished[step - delay])
        launch = launch + work[step % len(work)]
        depart = np.maximum(launch, link)
        link = depart[:, plan[phase].sources].max(axis=2) + exchange[phase]
        finished.append(link)
        now = found[:, step] = launch if delay else link
    return found


def per_step(
    compute: Floats, exchange: Sequence[Floats], plan: Sequence[Round], delay: int, work: Sequence[Floats]
) -> Floats:
    """Mean seconds per step of the slowest worker, [runs], over the last 64 steps or the whole periods among them."""
    # Without the first steps, in which the delay by a straggler still spreads.
    counted = COUNTED_STEPS // len(plan) * len(plan) or COUNTED_STEPS
    last = ready(compute, exchange, plan, delay, work).max(axis=2)
    return np.asarray((last[:, -1] - last[:, -1 - counted]) / counted, dtype=np.float64)


def sampled(
    compute: Floats, exchange: Sequence[Floats], plan: Sequence[Round], delay: int, work: Sequence[Floats]
) -> Floats:
    """Mean seconds per step, as `per_step`, for a period longer than the counted steps. The seconds of a step without
    messages, plus the seconds that messages add, scaled from the counted steps to the period:

    alone + (per_step - alone) counted steps * messages per period / (period * messages in the counted steps)"""
    steps, period, size = compute.shape[1], len(plan), compute.shape[2]
    talking = [step for step, one in enumerate(plan) if not one.silent]
    alone = per_step(compute, [np.zeros(size)], [Round(np.arange(size)[:, None], ())], delay, [NO_WORK])
    if not talking:
        return alone
    # The first step with messages is the first that counts, so that all the waiting that it causes is counted.
    places = [(talking[0] + step - (steps - COUNTED_STEPS)) % period for step in range(steps)]
    sampled_talks = sum(place in set(talking) for place in places[-COUNTED_STEPS:])
    shown = [plan[place] for place in places], [work[place % len(work)] for place in places]
    found = per_step(compute, [exchange[place] for place in places], shown[0], delay, shown[1])
    return alone + (found - alone) * COUNTED_STEPS * len(talking) / (sampled_talks * period)


def step_tasks(
    compute: Floats, exchange: Sequence[Floats], plan: Sequence[Round], delay: int, work: Sequence[Floats] = (NO_WORK,)
) -> list[Task[str]]:
    """Steps as tasks of every worker and its link, as `ready` times them; `compute` is [steps, size]."""
    found = []

    def landed(rank: int, step: int) -> tuple[str, ...]:
        return (f"exchange {step} of {rank}",) if step >= 0 else ()

    def before(rank: int, step: int) -> tuple[str, ...]:
        return () if delay else landed(rank, step - 1)

    for step, seconds in enumerate(compute):
        phase = step % len(plan)
        mixing = np.broadcast_to(work[step % len(work)], seconds.shape)
        for rank in range(len(seconds)):
            found.append(Task(f"compute {step} of {rank}", f"worker {rank}", float(seconds[rank]), before(rank, step)))
            needs = landed(rank, step - delay) if delay else ()
            found.append(Task(f"mix {step} of {rank}", f"worker {rank}", float(mixing[rank]), needs))
        for rank, sources in enumerate(plan[phase].sources.tolist()):
            launched = [f"mix {step} of {j}" for j in sources]
            waits = [name for j in sources for name in (landed(j, step - 1) if delay else ())]
            duration = float(exchange[phase][rank])
            found.append(Task(f"exchange {step} of {rank}", f"link {rank}", duration, (*launched, *waits)))
    return found


@checked
@dataclass(frozen=True)
class GossipForecast(Method):
    """Forecast of gossip, x_i+ = sum_j w_ij x_j + u_i over islands of devices.

    Args:
        topology: communication graph over the islands, adapted to the nodes (`placed`).
        delay: updates between sending and mixing.
        encoding: costs of encoding messages.
        within: costs inside an island.
        beside: optimizer states that are mixed with the parameters.
        kept: copies of the parameters that rule and codec keep from step to step.
    """

    topology: Topology
    delay: int = 1
    weights: Weights = field(default_factory=Own)
    encoding: Encoding = PLAIN
    within: Within = field(default_factory=Alone)
    beside: tuple[StateMessage, ...] = ()
    kept: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, "0 blocks, 1 overlaps", delay=self.delay)
        at_least(0, "copies of the parameters", kept=self.kept)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        loads = {(t, load) for t in self._talks(setting) for one in self._rounds(setting, t) for load in one.loads}
        exchanged = [price for talk, load in loads for price, _ in self._exchanged(setting, talk, load)]
        return (*exchanged, *self.within.prices(setting))

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        exchange, plan = self._plan(setting)
        compute, work = self._compute(setting, factors), self._work(setting)
        timed = per_step if len(plan) <= COUNTED_STEPS else sampled
        return timed(compute, exchange, plan, self.delay, work)

    def tasks(self, setting: Setting) -> list[Task[str]]:
        exchange, plan = self._plan(setting)
        # Enough steps for a period, and for messages to arrive after the delay.
        steps = min(COUNTED_STEPS, max(4, len(plan), 2 * self.delay))
        compute = self._compute(setting, np.ones((1, steps, setting.cluster.workers)))
        return step_tasks(compute[0], exchange, plan, self.delay, self._work(setting))

    def card_bytes(self, setting: Setting) -> float:
        """Bytes that leave the busiest node per step: mean copies over a period times bytes, summed over messages."""
        size, per_node = self._size(setting), self._workers_per_node(setting)
        # Communication between the devices of an island on one node stays inside.
        found = 0.0
        for t in self._talks(setting):
            plan = self._rounds(setting, t)
            more = per_node * sum(one.more for one in plan) / len(plan) if setting.cluster.nodes > 1 else 0.0
            copies = planned_traffic.mean_copies(t.topology, self.weights, size, per_node, t.encoding.cliques)
            found += t.wire_bytes * (copies + more)
        return found

    def memory_bytes(self, setting: Setting) -> float:
        """Bytes on a device: of training, of messages in flight, and of the states of rule and codec."""
        flying = 0.0
        for talk in self._talks(setting):
            part, plan = talk.bytes / self.within.devices, self._rounds(setting, talk)
            most = max(1 if load.clique else one.sources.shape[1] - 1 + one.more for one in plan for load in one.loads)
            # One sent message, and one from each source.
            each = part + most * talk.encoding.wire_bytes(part) if most else 0.0
            flying += most_in_flight(talk.topology, self._size(setting), self.delay) * each
        return self.within.memory_bytes(setting) + flying + self.kept * self.within.kept_bytes(setting)

    def round_seconds(self, setting: Setting) -> float:
        """Compute seconds of a round per step (correct, copy or encode, decode, mix), without the network. The mean
        over workers and a period."""
        return float(np.mean([work.mean() for work in self._work(setting)]))

    # ---- seconds of a round -------------------------------------------------------------------------------------

    def _size(self, setting: Setting) -> int:
        return setting.cluster.simulated.workers // self.within.devices

    def _workers_per_node(self, setting: Setting) -> int:
        return max(1, setting.cluster.per_node // self.within.devices)

    def _talks(self, setting: Setting) -> list[Talk]:
        """Messages of a step: one with the parameters, then one for each mixed optimizer state."""
        model, parts = setting.model, len(self.topology.fragments)
        states = [Talk(b.topology, b.encoding, model.bytes_of_state(b.name)) for b in self.beside]
        return [Talk(self.topology, self.encoding, model.parameter_bytes / parts), *states]

    def _rounds(self, setting: Setting, talk: Talk) -> tuple[Round, ...]:
        size, per_node = self._size(setting), self._workers_per_node(setting)
        whole, cliques = setting.cluster.workers // self.within.devices, talk.encoding.cliques
        if size == whole:
            return planned_traffic.rounds(talk.topology, self.weights, size, per_node, cliques)
        return planned_traffic.rounds_of_part(talk.topology, self.weights, size, whole, per_node, cliques)

    def _plan(self, setting: Setting) -> tuple[list[Floats], tuple[Round, ...]]:
        """Compute (exchange seconds of every worker, rounds) for each step of a period."""
        plans = []
        for talk in self._talks(setting):
            plan = self._rounds(setting, talk)
            loads = {load for one in plan for load in one.loads}
            part = talk.encoding.wire_bytes(talk.bytes / self.within.devices)
            gathered, seconds = self.within.gathering(setting).seconds(talk.bytes), dict.fromkeys(loads, 0.0)
            for load in loads:
                moved = [price.seconds(copies * part) for price, copies in self._exchanged(setting, talk, load)]
                # Codes go to owners of parts, and back. Messages inside nodes and between nodes are sent at the same
                # time; the gather needs all of them.
                ways = 2 if load.clique and talk.encoding.cliques is Cliques.OWNERS else 1
                seconds[load] = ways * max(moved) + gathered if moved else 0.0
            own = [np.array([seconds[load] for load in one.loads]) for one in plan]
            # A sender with several targets serves them together, so its slowest source decides when a worker can mix.
            plans.append(([busy[one.sources].max(axis=1) for busy, one in zip(own, plan, strict=True)], plan))
        return joined(plans)

    def _exchanged(self, setting: Setting, talk: Talk, load: RoundLoad) -> list[tuple[Price, float]]:
        """Compute (price, messages) inside the node and between nodes; one direction only if owners add up codes."""
        cluster = setting.cluster
        together = min(self.within.devices, cluster.per_node)
        flows = load.flows * together
        if load.clique and talk.encoding.cliques is Cliques.OWNERS:
            others = load.clique - (load.per_node if load.between else 1)
            reach, group = ("between", cluster.nodes) if load.between else ("inside", cluster.per_node)
            shared = flows * load.per_node if load.between else 1
            return [(setting.network.price("exchange", reach, group, shared, 1, others), others / load.clique)]
        # Exchanges were measured with one worker of each node, or with the workers of one node.
        sides = ("inside", load.inside, cluster.per_node, 1), ("between", load.between, cluster.nodes, flows)
        operation = "all_reduce" if load.clique else "exchange"
        return [
            (setting.network.price(operation, reach, load.clique or group, flows, load.per_node, messages), messages)
            for reach, messages, group, flows in sides
            if messages
        ]

    def _compute(self, setting: Setting, factors: Floats) -> Floats:
        """Seconds of forward, backward and update, [runs, steps, islands]."""
        runs, steps, _ = factors.shape
        # The devices of an island wait for the slowest.
        slowest = factors.reshape(runs, steps, self._size(setting), self.within.devices).max(axis=3)
        return at_factors(lambda factor: makespan(run(self.within.step(setting, factor))), slowest)

    def _work(self, setting: Setting) -> list[Floats]:
        """Compute seconds of a round, [size], for each step of the period."""
        works = [self._work_of(setting, talk) for talk in self._talks(setting)]
        steps = range(lcm(*map(len, works)))
        return [np.asarray(sum(work[step % len(work)] for work in works), dtype=np.float64) for step in steps]

    def _work_of(self, setting: Setting, talk: Talk) -> list[Floats]:
        model, work, copies = setting.model, talk.encoding.work(setting.model), talk.encoding.copies
        kept = self.within.kept_bytes(setting) * talk.bytes / max(1, model.parameter_bytes)
        own = copies * kept * work.own_seconds_per_byte
        # A device of an island receives its part.
        each = work.message_seconds + copies * talk.bytes / self.within.devices * work.heard_seconds_per_byte
        own += work.round_seconds
        plan = self._rounds(setting, talk)
        # A worker decodes its own part as each of the others sent it, and each of the others' parts of the mean.
        owners = talk.encoding.cliques is Cliques.OWNERS
        clique = max(load.clique for one in plan for load in one.loads) if owners else 0
        each += bool(clique) * each + max(0, 2 * (clique - 2)) * work.message_seconds
        return [np.where(one.received > 0, own + one.received * each, 0.0) for one in plan]
