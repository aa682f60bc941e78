"""LAW: slices through compiled blocks give the gradients of the whole model.

The compiler's front end alone is asked, with what it traced run as it is: that needs no C++ compiler.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.pipeline import Keep, OneForwardOneBackward
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.wire.executor import Channel, Executor
from tests.pipeline.causal import BLOCKS, apart, batch, built, token_mean, whole

SLICES = [5, 4, 4]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "blocks"), [("gpt2, tied", "transformer.h"), ("llama", "model.layers")])
def test_gradients_of_slices_are_those_of_the_whole_model(name: str, blocks: str) -> None:
    ids, mask, labels = batch(padded=False)
    _, wanted = whole(name, torch.float64, ids, mask, labels)
    graphs: list[Any] = []

    def traced(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = built(name)
    for block in model.get_submodule(blocks):
        block.compile(backend=traced)
    parts, call = adapted(model), Call(ids, mask)
    stage = Stage(parts, StagePlace(0, BLOCKS, True, True), [call], SLICES, Keep())

    def close(microbatch: int, logits: Tensor) -> Tensor:
        return token_mean(parts.answer(call, logits).logits, labels)

    Executor(stage, Channel({}, {}, torch.device("cpu")), close).run(
        OneForwardOneBackward().actions(1, 1, len(SLICES))[0]
    )
    assert len(graphs) >= BLOCKS
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert apart(found, wanted) < 1e-9
