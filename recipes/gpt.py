"""GPT-2 over windows of tokens, from `transformers.GPT2Config` (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_decentral.recipes.extras import configured, extra
from lightning_decentral.recipes.learner import Learner, MakeOptimizer, MakeScheduler

# GPT2Config's own are token 50256 of its own vocabulary, which other vocabularies lack.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}


class GPT(Learner):
    """`transformers.GPT2LMHeadModel`, untrained; score: mean cross-entropy of an example in nats per token."""

    score_name = "nats_per_token"

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        configuration = configured("GPT2Config", {**NO_SPECIAL_TOKENS, **config})
        network = extra("transformers").GPT2LMHeadModel(configuration)
        super().__init__(network=network, optimizer=optimizer, scheduler=scheduler, criterion=criterion)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of the token after each position of `inputs` [batch, length]."""
        logits: Tensor = self.network(input_ids=inputs).logits
        return logits

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """-mean_t log p(target_t), in nats, for each example."""
        nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return nats.view_as(targets).mean(dim=-1)
