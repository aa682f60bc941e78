"""One optimizer's parameters and the mixer that mixes them."""

from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.buckets import Bucket, with_tail


class Trained:
    """What an optimizer trains, packed as its island packs it.

    Args:
        taken: parameters that an optimizer mixes already; a parameter of several is mixed by the first.
        bucket_bytes: largest bucket; by default `buckets.bucket_bytes_of` them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mixer: Mixer,
        taken: set[nn.Parameter],
        member: IslandMember,
        bucket_bytes: int | None = None,
    ) -> None:
        self.optimizer, self.mixer = optimizer, mixer
        self.buckets: list[Bucket] = []
        self.packs: list[int] = []
        self._taken, self._member, self._bucket_bytes = taken, member, bucket_bytes

    def adopt(self, number: int | None = None) -> None:
        """Take in what the optimizer got since the last look (gradual unfreezing adds groups).

        With a number, the next so many, frozen or not: a resumed run may not have unfrozen yet what a message holds.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        new = [p for p in dict.fromkeys(parameters) if p not in self._taken and (number or p.requires_grad)][:number]
        if new:
            self._taken.update(new)
            buckets = self._member.pack(new, self._bucket_bytes)
            self.buckets += buckets
            self.packs.append(len(new))
            mixed = with_tail(buckets)
            self.mixer.extend(mixed, [span.matrices for span in mixed])

    def step(self, learning_rate: float) -> None:
        """One round."""
        self.mixer.step(learning_rate)
        self._store()

    def drain(self) -> None:
        """Land all that is in flight."""
        for bucket in self.buckets:
            bucket.adopt()
        self.mixer.drain()
        self._store()

    def _store(self) -> None:
        for bucket in self.buckets:
            bucket.store()

    def release(self) -> None:
        """Give every parameter a storage of its own again."""
        for bucket in self.buckets:
            bucket.release()
