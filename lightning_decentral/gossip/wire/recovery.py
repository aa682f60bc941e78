"""Recovery: what a part of a model was healed to, kept until the worker's other parts are sound, too.

Fragments, and the parameters of several optimizers, are healed each where its own round lands. Until the last of them
is, every gradient is of a model with NaN, and would poison again what was healed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.healing import sound_alone
from lightning_decentral.shared.compute.buckets import Bucket


class Recovery:
    """Of one mixer's buckets.

    Args:
        forget: what else of the worker is poisoned begins anew.
        others_sick: whether other parts of the worker hold what isn't sound.
    """

    def __init__(
        self, buckets: Sequence[Bucket], forget: Callable[[], None], others_sick: Callable[[], bool] = bool
    ) -> None:
        self._buckets, self._forget, self._others_sick = buckets, forget, others_sick
        self._recovers, self._held = False, list[Tensor]()

    @property
    def sick(self) -> bool:
        return not sound_alone([bucket.flat for bucket in self._buckets])

    def healed(self) -> None:
        """A bucket has been."""
        self._recovers = True
        self._forget()

    @torch.no_grad()
    def begin(self) -> None:
        """After an update, before anything reads the parameters."""
        if not self._held:
            return
        for bucket in self._buckets:
            bucket.adopt()
        if self.sick:
            for bucket, held in zip(self._buckets, self._held, strict=False):
                bucket.flat.copy_(held)
                bucket.store()
            self._forget()

    def end(self) -> None:
        """After a round. Waits for a device while the worker recovers, and only then."""
        if self._recovers:
            self._recovers = self._others_sick()
            self._held = [bucket.flat.clone() for bucket in self._buckets] if self._recovers else []
