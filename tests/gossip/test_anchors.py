"""Rules with an anchor are validated, saved and handed back by it; fragments and exact steps run under a trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Codec,
    Complete,
    DifferenceCompression,
    Elastic,
    Every,
    FullyShard,
    Gossip,
    GossipReplicas,
    Int2,
    Int4,
    Int8,
    OuterNesterov,
    PseudoGradient,
    Ring,
    Stream,
    TopK,
    Travel,
    simulate,
)
from lightning_decentral.gossip.mixer_builder import exact_steps_of, place, refuse_stale
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import pack
from tests.elastic.wire.lobbies import LobbyProcess
from tests.gossip.wire.test_exchange import gradient
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

SIZE, STEPS, TALK = 3, 6, 4


class Validated(Quadratic):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """What it sees is noted by `Note`."""

    val_dataloader = Quadratic.train_dataloader


class Note(Callback):
    """Writes what worker 0 validates."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            torch.save(next(pl_module.parameters()).detach().clone(), self._path)


def fit(folder: Path, steps: int, callbacks: bool, options: dict[str, Any], module: Quadratic | None = None) -> Tensor:
    settings = {**QUIET, "max_steps": steps, "limit_val_batches": 1, "enable_checkpointing": callbacks}
    strategy = GossipStrategy(start_method="fork", **options)
    watching = [Note(folder / "validated.pt"), ModelCheckpoint(folder, filename="saved")] if callbacks else []
    if callbacks:
        settings |= {"val_check_interval": steps}
    module = module or Validated()
    Trainer(**settings, devices=SIZE, strategy=strategy, callbacks=[Record(folder), *watching]).fit(module)
    return module.x.detach()


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [OuterNesterov(), PseudoGradient()], ids=str)
def test_the_anchor_is_validated_saved_and_handed_back(tmp_path: Path, rule: Any) -> None:
    """Two steps after all were at it: what they learnt since isn't in it."""
    options = {"topology": Every(TALK, Complete()), "combine": rule, "delay": 0}
    handed_back = in_processes(fit, tmp_path, STEPS, True, options)
    path = recorded(tmp_path, SIZE)
    anchor = path[TALK - 1].mean(0)
    torch.testing.assert_close(path[TALK - 1], anchor.expand(SIZE, -1), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(path[-1].mean(0), anchor, atol=1e-2)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]["x"]
    for shown in (handed_back, torch.load(tmp_path / "validated.pt"), saved):
        torch.testing.assert_close(shown, anchor, rtol=1e-12, atol=1e-12)


class Last(Callback):
    """Remembers the parameters behind the last update."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.x = next(pl_module.parameters()).detach().clone()


def test_an_elastic_run_saves_what_it_validates(tmp_path: Path) -> None:
    """The anchor, not what its worker has learnt since."""
    settings = {**QUIET, "max_steps": STEPS, "limit_val_batches": 1, "val_check_interval": STEPS}
    watching = [Note(tmp_path / "validated.pt"), ModelCheckpoint(tmp_path, filename="saved"), last := Last()]
    with LobbyProcess(least=1, most=1) as lobby:
        elastic = Elastic(lobby=lobby.place, workers=(1, 1), host="127.0.0.1")
        plan = {"topology": Every(TALK, Complete()), "combine": OuterNesterov(lr=0.7, momentum=0.9), "delay": 0}
        strategy: Any = GossipStrategy(elastic=elastic, **plan)
        Trainer(**{**settings, "enable_checkpointing": True}, devices=1, strategy=strategy, callbacks=watching).fit(
            Validated()
        )
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]["x"]
    assert torch.equal(saved, torch.load(tmp_path / "validated.pt"))
    assert not torch.allclose(saved, last.x, atol=1e-2)


class Halves(Quadratic):
    """The same in two parameters, of which each is a fragment."""

    def __init__(self) -> None:
        super().__init__(dim=6)
        self.first, self.second = (nn.Parameter(part.clone()) for part in self.x.detach().chunk(2))
        del self.x

    @property
    def x(self) -> Tensor:
        return torch.cat([self.first, self.second])


@pytest.mark.parametrize(("delay", "exact_steps"), [(0, 3), (1, 0.2)])
def test_a_trainer_with_fragments_and_exact_steps_is_the_simulation(
    tmp_path: Path, delay: int, exact_steps: float
) -> None:
    """A fifth of 14 steps are 3."""
    plan, rule = Stream(4, 2, Complete()), OuterNesterov(lr=None, momentum=None)
    options = {"topology": plan, "combine": rule, "exact_steps": exact_steps, "delay": delay}
    in_processes(fit, tmp_path, 14, False, options, Halves())
    x0 = Halves().x.detach().expand(SIZE, -1)
    expected = simulate(plan, rule, gradient, x0, 14, 0.1, delay, exact_steps=3)
    torch.testing.assert_close(recorded(tmp_path, SIZE), expected[1:], rtol=1e-12, atol=1e-12)
    apart = expected[8:].std(1) > 1e-9
    together = [~half.any(1) for half in apart.chunk(2, dim=1)]
    assert delay or not torch.equal(*together), "both fragments talked at once: the test could not fail"


@pytest.mark.parametrize(("options", "said"), [
    ({"codec": Int4()}, r"Int4\(.*\) by itself would lose too much"),
    ({"states": {"exp_avg": Travel()}, "topology": Stream(4, 2, Ring())}, "states can't be mixed with Stream"),
    ({"states": {"exp_avg": Travel()}, "island": FullyShard(devices=2)}, "states can't be mixed with an isl"),
    ({"states": {"exp_avg": Travel()}, "delay": 3, "topology": Every(3, Ring())}, None),
    ({"states": {"exp_avg": Travel()}, "delay": 0}, None),
    ({"codec": DifferenceCompression(Int4()), "combine": PseudoGradient()}, r"sends differences already.*codec=Int4\("),
    ({"codec": TopK(), "combine": PseudoGradient(), "topology": Every(2, Complete())}, r"lr / \(1 - momentum\) = 7"),
    ({"codec": TopK(), "combine": PseudoGradient(momentum=0.5), "topology": Every(2, Complete())}, None),
    ({"codec": Int2(), "combine": PseudoGradient(), "topology": Every(2, Complete())}, None),
], ids=str)  # fmt: skip
def test_what_does_not_go_together_is_said_before_anybody_talks(options: dict[str, Any], said: str | None) -> None:
    def set_up() -> None:
        strategy = GossipStrategy(**options)
        strategy.parallel_devices = [torch.device("cpu")] * 4
        place(strategy, strategy.workers_per_node, strategy.workers)

    if said is None:
        set_up()
    else:
        with pytest.raises(ValueError, match=said):
            set_up()


@pytest.mark.parametrize(
    ("codec", "rate", "served"),
    [
        (DifferenceCompression(Int8()), 1.0, True),
        (DifferenceCompression(Int4()), 1.0, True),
        (DifferenceCompression(Int2()), 1.0, False),
        (DifferenceCompression(Int2()), 0.4, True),
        (DifferenceCompression(TopK(fraction=0.1)), 0.6, False),
        (DifferenceCompression(TopK(fraction=0.1)), 0.3, True),
        (Int8(), 1.0, True),
    ],
    ids=str,
)
def test_a_rate_over_what_arrives_is_refused_where_parameters_are_packed(
    codec: Codec, rate: float, served: bool
) -> None:
    buckets = pack([nn.Parameter(torch.zeros(9, 64))])
    if served:
        refuse_stale(codec, Gossip(rate=rate), buckets)
    else:
        with pytest.raises(ValueError, match=r"workers would diverge. Use Gossip\(rate=0\.\d+\), or a codec") as error:
            refuse_stale(codec, Gossip(rate=rate), buckets)
        assert "\n" not in str(error.value)


def test_a_coarse_codec_goes_with_ways() -> None:
    assert GossipStrategy(combine=PseudoGradient(), codec=Int4(), topology=Every(2, Complete())).codec == Int4()


@pytest.mark.parametrize(
    ("asked", "steps"), [(0, 0), (0.1, 20), (0.999, 200), (0.001, 0), (1, 1), (1.0, 1), (7, 7), (5000, 5000)]
)
def test_exact_steps_below_one_are_a_share_of_the_run_that_worker_0_has(asked: float, steps: int) -> None:
    module = SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=400))
    assert exact_steps_of(asked, module, lambda own: own / 2) == steps


@pytest.mark.parametrize("total", [float("inf"), -1])
def test_a_share_of_a_run_without_an_end_is_one_line(total: float) -> None:
    module = SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=total))
    with pytest.raises(
        ValueError, match=r"exact_steps=0.1 is a share of the run, .* give steps, or max_steps"
    ) as error:
        exact_steps_of(0.1, module, float)
    assert "\n" not in str(error.value)
    assert exact_steps_of(3, module, float) == 3


@pytest.mark.parametrize("exact_steps", [-1, 1.5, -0.1])
def test_exact_steps_are_steps_or_a_share(exact_steps: float) -> None:
    with pytest.raises(ValueError, match="exact_steps must be"):
        GossipStrategy(exact_steps=exact_steps)


def test_a_rule_that_has_begun_does_not_end_where_a_run_is_made_longer() -> None:
    """The steps that were saved, whatever the share of the longer run is."""

    def of(steps: int) -> Mixers:
        return Mixers(lambda: MixerFactory(list, pack, exact_steps=steps))

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    first, second = of(3), of(300)
    for mixers in (first, second):
        mixers.of(optimizer)
    second.load_state_dict(first.state_dict(), [optimizer])
    assert (first._timed().exact_steps, second._timed().exact_steps) == (3, 3)


def test_stages_have_no_fragments_of_their_own() -> None:
    with pytest.raises(ValueError, match="splits a model, which stages have split already"):
        GossipReplicas(topology=Stream(4, 2, Complete())).check(4, 1)
