"""`hydra/launcher=shard_parallel`: members of a sweep share devices, a batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

POLICIES = {
    "lrtf": "LRTF",
    "srtf": "SRTF",
    "round_robin": "RoundRobin",
    "fifo": "FIFO",
    "complementary": "Complementary",
    "asha": "ASHA",
}
# Names that hydra.launcher.policy takes, too, and the class that carries such a sweep out; policies have `GRANTED`.
GRANTED = "lightning_decentral.sweep.launcher.Carrier"
CARRIERS = {
    "jigsaw": "lightning_decentral.sweep.jigsaw.JigSaw",
    "spase": "lightning_decentral.sweep.spase.SpaseCarrier",
}
# What hydra.launcher.policy.KEY may set, and what it is by default.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "asha": {"metric": None, "mode": None, "reduction_factor": 3, "min_validations": 1},
    "spase": {
        "candidates": None,
        "table": None,
        "trial_steps": 10,
        "trial_limit_seconds": 300.0,
        "interval_seconds": 60.0,
    },
}


@dataclass
class ShardParallelConf:
    """Keys of hydra.launcher, explained as arguments of `ShardParallelLauncher`."""

    _target_: str = "hydra_plugins.shard_parallel.launcher.ShardParallelLauncher"
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"policy": "lrtf"}])
    policy: Any = None
    devices: Any = None
    memory_bytes: int | None = None
    quantum_seconds: float = 0.25
    alive_per_device: int = 4
    resume: bool = False
    checkpoint: str = "checkpoint"


_STORE = ConfigStore.instance()
_STORE.store(group="hydra/launcher", name="shard_parallel", node=ShardParallelConf, provider="shard_parallel")
for _name, _class in POLICIES.items():
    _node = {"_target_": f"lightning_decentral.sweep.plan.policy.{_class}", **ARGUMENTS.get(_name, {})}
    _STORE.store(group="hydra/launcher/policy", name=_name, node=_node, provider="shard_parallel")
for _name in CARRIERS.keys() & ARGUMENTS:
    _node = {"_target_": CARRIERS[_name], "_partial_": True, **ARGUMENTS[_name]}
    _STORE.store(group="hydra/launcher/policy", name=_name, node=_node, provider="shard_parallel")


class ShardParallelLauncher(Launcher):
    """Runs every member of a sweep as its own process, and lets the members take turns on the devices.

    Args:
        policy: decides which member is next on a free device; choose one with `hydra/launcher/policy=srtf`. Or a name
            of `CARRIERS`.
        devices: a number, or names such as `[cuda:0,cuda:2]`; None: every GPU, or one processor.
        memory_bytes: bytes of each device. Members that fit together stay on the device; None: all fit.
        quantum_seconds: how long a member keeps a device before it asks again.
        alive_per_device: members in training at once, for each device.
        resume: resume the unfinished members of `hydra.sweep.dir`.
        checkpoint: key of the application's configuration that takes the path of a checkpoint to resume from.
    """

    def __init__(
        self,
        policy: Any,
        devices: Any = None,
        memory_bytes: int | None = None,
        quantum_seconds: float = 0.25,
        alive_per_device: int = 4,
        resume: bool = False,
        checkpoint: str = "checkpoint",
    ) -> None:
        if policy is None or (isinstance(policy, str) and policy not in CARRIERS):
            also = f", or hydra.launcher.policy={' or '.join(CARRIERS)}" if CARRIERS else ""
            known = ", ".join(POLICIES)
            raise ValueError(
                f"hydra.launcher.policy={policy}: choose one with hydra/launcher/policy=..., of {known}{also}"
            )
        if alive_per_device < 1:
            raise ValueError(f"hydra.launcher.alive_per_device must be at least 1 member, got {alive_per_device}")
        self._sweep: Any = None
        # From Hydra 1.4 on a plug-in gets its parts as they are configured.
        made = instantiate(policy) if OmegaConf.is_config(policy) else policy
        self._granting = (devices, memory_bytes, made, quantum_seconds)
        # A carrier with options comes as a function of the others.
        named = get_class(CARRIERS[policy] if isinstance(policy, str) else GRANTED)
        self._carrier = made if isinstance(made, partial) else named
        self._launching: dict[str, Any] = {
            "alive_per_device": alive_per_device,
            "resume": resume,
            "checkpoint": checkpoint,
        }

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what Hydra gives to every launcher."""
        self._hydra_context, self._task_function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their outcomes in order; the outcome of a failed job has its exception."""
        from lightning_decentral.sweep.launcher import Launch

        # A sweeper that chooses by what came before asks many times: all its jobs are one sweep.
        self._sweep = self._sweep or Launch(**self._launching)
        carrier = self._carrier(*self._granting)
        hydra = self._hydra_context, self._task_function, self._config
        found: Sequence[JobReturn] = self._sweep(carrier, *hydra, job_overrides, initial_job_idx)
        return found
