"""What Lightning sees of an elastic worker: one process with one device, whose rank is that of its age."""

import os
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_decentral.gossip.elastic.elastic import Elastic
from lightning_decentral.gossip.elastic.launcher import (
    ElasticLauncher,
    FollowingLauncher,
    refuse_restarting_all,
    refuse_unstarted,
    seat,
    started,
    starts_workers,
)
from lightning_decentral.shared.replica import ReplicaStrategy


class OneProcess(ReplicaStrategy):
    """There are no groups: who trains together changes."""

    elastic: Elastic
    _rank: int | None = None
    _beside = 0

    def _configure_launcher(self) -> None:
        cluster, devices, method = self.cluster_environment, self.parallel_devices, self._start_method
        assert cluster is not None
        assert devices is not None
        refuse_restarting_all(cluster)
        if started(os.environ):
            self._beside = len(devices)
            self.parallel_devices = [devices[seat(os.environ) % len(devices)]]  # the others' are those beside it
            self._launcher = FollowingLauncher(cluster, 1, 1)
        elif starts_workers(self.elastic, os.environ):
            refuse_unstarted(self.elastic, cluster, len(devices), self.num_nodes, str(method))
            self._launcher = ElasticLauncher(cluster, len(devices), 1, self.elastic)
        else:
            super()._configure_launcher()

    @property
    def planned_workers(self) -> int:
        """With so many the run begins if nothing is amiss."""
        return self._beside or self.elastic.workers[1]

    def set_world_ranks(self) -> None:
        """Until it is known who is the oldest, the one that was started first is taken for it; a starter is nobody."""
        assert self.cluster_environment is not None
        if self._rank is None:
            later = self.cluster_environment.local_rank() > 0
            self._rank = int(later or (starts_workers(self.elastic, os.environ) and not started(os.environ)))
        super().set_world_ranks()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def global_rank(self) -> int:
        """0 for the oldest member, who writes and logs."""
        return self._rank or 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _rank_as(self, rank: int) -> None:
        self._rank = rank
        of_all: Any = rank_zero_only
        of_all.rank = rank_zero_of_fabric.rank = rank  # type: ignore[attr-defined]
