"""Faults that combinations had, to be put back: a test of the tests. Each is called in every worker before the run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.elastic.run import ElasticRun
from lightning_decentral.gossip import pipeline_replicas as gossip_replicas
from lightning_decentral.gossip.compute.combine.gradient_tracking import QuasiGlobalMomentum
from lightning_decentral.gossip.compute.combine.outer import Outer
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.compute.mixing import Sick
from lightning_decentral.gossip.wire import island_member
from lightning_decentral.gossip.wire.exchange import Landed, Traffic
from lightning_decentral.gossip.wire.island_shards import Used
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import OptimizerMixer, Written
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.partial.compute import search
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.shared.compute import buckets, layout
from lightning_decentral.shared.compute.layout import Place
from lightning_decentral.shared.replica_health import ReplicaHealth
from lightning_decentral.shared.updates import BeforeUpdate
from lightning_decentral.shared.wire import health, pipeline_replicas
from lightning_decentral.shared.wire.averaging import gradient_average, residuals
from lightning_decentral.shared.wire.averaging.equal_replicas import RunningBuffers
from lightning_decentral.spilled.compute import spill
from lightning_decentral.spilled.compute.engine import Engine, Standing


def layout_of_the_moment() -> None:
    """Buckets lie as their parameters do now."""

    @torch.no_grad()
    def adopt(bucket: Any) -> None:
        for number, (parameter, offset) in enumerate(zip(bucket.parameters, bucket._offsets, strict=True)):
            if parameter.data_ptr() != bucket.held.data_ptr() + offset * bucket.held.element_size():
                bucket.places[number] = Place.of(parameter)
                view = buckets._view(bucket.held, offset, bucket.places[number])
                view.copy_(parameter)
                parameter.data = view

    _set(buckets.Bucket, "adopt", adopt)
    _set(layout.ModelLayout, "restore", lambda self, parameters=None: None)


def strides_not_compared() -> None:
    _set(layout, "_text", lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")


def replaced_optimizers_not_followed() -> None:
    _set(GossipStrategy, "replaced", lambda self: None)
    _set(Mixers, "_sharing", lambda self, optimizer, own: [])


def late_buffers_once_an_epoch() -> None:
    _set(RunningBuffers, "changed", lambda self: False)


def thawed_within_the_step() -> None:
    _set(CompressedStrategy, "pre_backward", lambda self, loss: None)
    _set(gradient_average, "UNSEEN", "")
    launcher = gradient_average.Launcher
    watched = launcher.watched.fget  # type: ignore[attr-defined]

    class All(frozenset):  # type: ignore[type-arg]
        def issuperset(self, other: object) -> bool:
            return True

    _set(launcher, "watched", property(lambda self: All(watched(self))))


def infinite_buffers_are_sick() -> None:
    _set(health, "_others", lambda tensor, known: tensor)


def a_save_heals() -> None:
    def landed(mixer: Any, flight: Any, place: int) -> Any:
        forget, mixer.healing.forget = mixer.healing.forget, lambda: None
        turn, message = mixer.turn(flight.round), flight.messages[place]
        try:
            return message.keep(mixer._rate(turn) is not None)
        except Sick as sick:
            mixed = mixer._healed(sick, flight, place, turn)
            return Landed(message.sent, message.sent.clone() if mixed is None else mixed)  # nothing corrects
        finally:
            mixer.healing.forget = forget

    _set(Mixer, "_keep", landed)


def anchors_over_writes() -> None:
    _set(Written, "look", lambda self: set())


def elastic_landings_over_writes() -> None:
    _set(ElasticRun, "settle", lambda self: self._mixers.settle())


def exact_steps_average_nan() -> None:
    _set(island_member, "mean_of_sound", lambda tensors, mean_of, *_, **__: (mean_of(tensors), ""))


def momentum_over_the_rate() -> None:
    def follow(rule: Any, state: Any, rate: float) -> None:
        before = state["learning_rate"]
        if rate > 0:
            state["momentum"].mul_(rate / float(before) if float(before) > 0 else 1.0)
            before.fill_(rate)

    _set(QuasiGlobalMomentum, "_follow", follow)


def averages_behind_the_hooks() -> None:
    _set(PartialBackpropStrategy, "pre_backward", lambda self, loss: self._steps.begin())
    _set(PartialBackpropStrategy, "post_backward", lambda self, loss: self._steps.end())


def feedback_of_the_unused_is_lost() -> None:
    _set(residuals.Residuals, "put_back", lambda *_: None)


def what_is_cleared_was_taken() -> None:
    _set(gradient_average.GradientAverage, "_withdraw_cleared", lambda self: None)


def poisoned_moments_stay() -> None:
    class Deaf(Healing):
        forget = property(lambda self: lambda: None, lambda self, value: None)  # type: ignore[assignment]

    from lightning_decentral.gossip import mixer_builder

    made = mixer_builder.healing
    _set(mixer_builder, "healing", lambda most, module: Deaf(most, made(most, module)._poisoned))


def thawed_after_the_update() -> None:
    _set(BeforeUpdate, "after", lambda self, closure, optimizer, precision: closure)
    _set(MixerFactory, "equalize", lambda self, new: self.alike(new))


def outer_steps_to_the_nearest_code() -> None:
    _set(Outer, "encoded", lambda self, x, state: None)


def bytes_of_replaced_mixers_are_lost() -> None:
    handed = OptimizerMixer.hand_over

    def hand_over(mixer: Any, *args: Any) -> Traffic:
        handed(mixer, *args)
        return Traffic()

    _set(OptimizerMixer, "hand_over", hand_over)


def padding_is_not_saved() -> None:
    _set(buckets.Bucket, "padding", property(buckets.Bucket.padding.fget, lambda self, values: None))  # type: ignore


def places_of_the_first_step() -> None:
    _set(Engine, "_renew", lambda self: self._look())


def thawed_where_nobody_looks() -> None:
    _set(spill.block_places, "as_standing", lambda places, hosts: None)
    _set(Standing, "look", lambda self: None)


def what_waits_is_not_in_the_file() -> None:
    _set(gradient_average.GradientAverage, "state_dict", lambda self: self._mean.state_dict())


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: plant the fault where it would be now"
    setattr(owner, name, value)


OUTER = '"rule": "OuterNesterov(lr=0.7, momentum=0.9)", "topology": "Every(steps=2, inner=Complete())"'


def bounds_of_stages_are_sick() -> None:
    _set(ReplicaHealth, "look", lambda self, buffers: None)


def thawed_on_its_stage_alone() -> None:
    give_back = Ownership.give_back

    def frozen_stay(holdings: Ownership, device: torch.device) -> None:
        before = {parameter: parameter.requires_grad for parameter in holdings.order}
        give_back(holdings, device)
        for parameter, trained in before.items():
            parameter.requires_grad_(trained)

    _set(Ownership, "give_back", frozen_stay)


def devices_of_shards_reduce_what_they_used() -> None:
    _set(Used, "_fill", lambda self, group, post_backward, *args: post_backward(*args))


def statistics_of_pipelines_are_their_own() -> None:
    _set(pipeline_replicas._Replicated, "updated", pipeline_replicas.Bond.updated)


def feedback_of_pipelines_is_in_no_file() -> None:
    _set(pipeline_replicas._CompressedAveraging, "keeps", False)


def pipelines_end_over_writes() -> None:
    _set(gossip_replicas._Mixing, "settle", lambda self: self._mixers.settle())


def a_copy_changes_the_module() -> None:
    _set(search, "untouched", lambda module: nullcontext())


PLANTED: list[tuple[Callable[[], None], str]] = [
    (layout_of_the_moment, f'{{{OUTER}, "gradient": "still", "events": [["apart", 2, 0], ["layout", 5, 0]]}}'),
    (strides_not_compared, '{"topology": "Complete()", "delay": "0", "layout": "one alone"}'),
    (
        replaced_optimizers_not_followed,
        '{"topology": "Complete()", "delay": "0", "gradient": "still", "events": [["replace", 4, 0], ["apart", 6, 0]]}',
    ),
    (late_buffers_once_an_epoch, '{"method": "compressed", "codec": "Plain()", "events": [["late buffer", 14, 0]]}'),
    (thawed_within_the_step, '{"method": "compressed", "codec": "Plain()", "events": [["thaw inside", 7, 0]]}'),
    (infinite_buffers_are_sick, '{"events": [["filling buffer", 8, 0], ["validate", 3, 0]]}'),
    (
        a_save_heals,
        '{"workers": "3", "gradient": "bowl", "optimizer": "adamw", "events": [["nan", 5, 1], ["save", 5, 0]]}',
    ),
    (
        poisoned_moments_stay,
        '{"workers": "3", "gradient": "bowl", "optimizer": "adamw", "events": [["nan", 5, 1]]}',
    ),
    (anchors_over_writes, f'{{{OUTER}, "events": [["write at end", 3, 0]]}}'),
    (
        elastic_landings_over_writes,
        f'{{"method": "elastic", {OUTER}, "delay": "1", "events": [["write at end", 3, 0]]}}',
    ),
    (
        pipelines_end_over_writes,
        '{"method": "pipelines", "workers": "4", "events": [["write at end", 4, 1]]}',
    ),
    (a_copy_changes_the_module, '{"method": "partial", "events": [["resume", 9, 0], ["late buffer", 10, 1]]}'),
    (exact_steps_average_nan, '{"workers": "3", "exact": "3", "gradient": "bowl", "events": [["nan", 2, 1]]}'),
    (
        momentum_over_the_rate,
        '{"workers": "3", "rule": "QuasiGlobalMomentum(momentum=0.5, rate=0.3)", "topology": "Ring()", '
        '"gradient": "bowl", "schedule": "restarts", "events": [["apart", 3, 0]]}',
    ),
    (averages_behind_the_hooks, '{"method": "partial", "events": [["clamp", 3, 0]]}'),
    (what_is_cleared_was_taken, '{"method": "compressed", "codec": "Int4(block=7)", "optimizer": "turns"}'),
    (thawed_after_the_update, '{"events": [["thaw", 5, 0]]}'),
    (
        outer_steps_to_the_nearest_code,
        '{"workers": "3", "rule": "OuterNesterov(lr=0.7, momentum=0.9)", "codec": "Int8(block=7)", '
        '"topology": "Every(steps=3, inner=OnePeerExponential())", "gradient": "still", "events": []}',
    ),
    (
        bytes_of_replaced_mixers_are_lost,
        '{"topology": "Exponential()", "states": "momentum", "optimizer": "two", "events": [["replace", 13, 1]]}',
    ),
    (
        padding_is_not_saved,
        '{"rule": "PseudoGradient(lr=LearningRatePower(power=1.0, rate=0.5), momentum=0.3)", '
        '"codec": "Int2(block=7)", "topology": "Complete()", "events": [["resume", 16, 0]]}',
    ),
    (places_of_the_first_step, '{"method": "spilled", "events": [["prune", 7, 0]]}'),
    (thawed_where_nobody_looks, '{"method": "spilled", "events": [["thaw inside", 7, 0]]}'),
    (
        what_waits_is_not_in_the_file,
        '{"method": "compressed", "codec": "TopK(fraction=0.3, block=8)", "optimizer": "turns", '
        '"precision": "bf16-mixed", "dtype": "several", "events": [["resume", 4, 0]]}',
    ),
    (
        bounds_of_stages_are_sick,
        '{"method": "pipelines", "workers": "4", "events": [["filling buffer", 3, 1], ["save", 5, 1]]}',
    ),
    (thawed_on_its_stage_alone, '{"method": "pipeline", "events": [["refit", 11, 0], ["thaw before backward", 9, 1]]}'),
    (devices_of_shards_reduce_what_they_used, '{"island": "FullyShard", "shape": "experts"}'),
    (
        statistics_of_pipelines_are_their_own,
        '{"method": "pipeline", "workers": "4", "events": [["late buffer", 8, 0]]}',
    ),
    (
        feedback_of_pipelines_is_in_no_file,
        '{"method": "pipeline", "workers": "4", "codec": "Int4(block=7)", "events": [["resume", 8, 0]]}',
    ),
    (feedback_of_the_unused_is_lost, '{"method": "compressed", "codec": "Int2(block=7)", "shape": "experts"}'),
]
"""(what puts the fault back, the smallest run that shows it)"""
