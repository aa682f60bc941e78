"""Several pipelines whose equal stages gossip, against whole models that do."""

import copy
import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Complete,
    ConsensusControl,
    Gossip,
    GossipReplicas,
    Hypercube,
    PushSum,
    Ring,
    simulate,
)
from lightning_decentral.pipeline import Uniform
from lightning_decentral.shared.compute.codec import Int8, Plain
from lightning_decentral.shared.wire.agreement import ALERT_SECONDS, PATIENCE_SECONDS
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.gossip.rules import IRREGULAR
from tests.pipeline.causal import VOCABULARY, WIDTH, token_mean
from tests.pipeline.training import Language, distance, forked, pipeline
from tests.world import world

CLIP, STEPS = 0.1, 4


def pipelines(replicas, devices=4, **options):
    return pipeline(devices, stages=2, replicas=replicas, **options)


def gossip(**options):
    """Two whole models."""
    strategy = GossipStrategy(start_method="fork", process_group_backend="gloo", **options)
    return {"strategy": strategy, "devices": 2}


def by_hand(delay, steps=STEPS):
    """The mean of two models in plain torch: x <- x + u(x), then mean - x of `delay` updates ago."""
    models = [Language() for _ in range(2)]
    optimizers = [model.configure_optimizers() for model in models]
    dataset = models[0]._loader().dataset
    rows = [list(DistributedSampler(dataset, num_replicas=2, rank=r)) for r in range(2)]
    sent = []
    for step in range(steps):
        for model, optimizer, mine in zip(models, optimizers, rows, strict=True):
            ids, mask, labels = dataset[mine[3 * step : 3 * step + 3]]
            optimizer.zero_grad()
            token_mean(model.model(input_ids=ids, attention_mask=mask).logits, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        if delay == 0:
            sent.append([copy.deepcopy(model.state_dict()) for model in models])
        if step >= delay:
            launched = sent.pop(0)
            for model, own in zip(models, launched, strict=True):
                mean = {n: (launched[0][n] + launched[1][n]) / 2 for n in own}
                now = model.state_dict()
                model.load_state_dict({n: now[n] + mean[n] - own[n] for n in own})
        if delay:
            sent.append([copy.deepcopy(model.state_dict()) for model in models])
    states = [model.state_dict() for model in models]
    return {n: (states[0][n] + states[1][n]) / 2 for n in states[0]}


WHOLE = {"gradient_clip_val": CLIP, "max_steps": STEPS, "limit_train_batches": STEPS}


def test_blocking(tmp_path):
    how = pipelines(GossipReplicas(topology=Complete(), delay=0))
    found, *_ = forked(Language(ordered=False), how, tmp_path, **WHOLE)
    assert distance(found, by_hand(delay=0)) < 1e-9


def test_stages_gossip_as_whole_models_would(tmp_path):
    """Tied embeddings stand on two stages; the mean is validated and handed back."""
    how = pipelines(GossipReplicas(topology=Complete()))
    found, losses, metrics = forked(Language(ordered=False), how, tmp_path / "p", **WHOLE)
    whole = gossip(topology=Complete())
    wanted, wanted_losses, wanted_metrics = forked(Language(ordered=False), whole, tmp_path / "g", **WHOLE)
    assert losses == pytest.approx(wanted_losses, rel=1e-9)
    assert distance(found, wanted) < 1e-9
    assert metrics == pytest.approx(wanted_metrics, rel=1e-6)


# ---- replicas that stay equal ---------------------------------------------------------------------------------------


class Scaled(Language):
    """With parameters beside the model, so many that the ends of an all-reduce's thirds lie in the embedding."""

    def __init__(self):
        super().__init__("gpt2, tied", torch.float32, ordered=False)
        self.scale = torch.nn.Parameter(torch.ones(220, VOCABULARY))

    def training_step(self, batch, batch_idx):
        ids, mask, labels = batch
        return token_mean(self.scale.mean(0) * self.model(input_ids=ids, attention_mask=mask).logits, labels)


class Copies(Callback):
    """What each worker has at the last step of a parameter that others have too."""

    def __init__(self, folder):
        self._folder = folder

    def on_train_batch_end(self, trainer, pl_module, *_):
        model = pl_module.model
        embedding = model.transformer.wte if trainer.strategy.stage == 0 else model.lm_head
        torch.save(
            {"scale": pl_module.scale, "embedding": embedding.weight}, self._folder / f"{trainer.global_rank}.pt"
        )


@pytest.mark.sampled
@pytest.mark.parametrize("codec", [Plain(), Int8()], ids=str)
def test_copies_of_a_parameter_on_several_stages_stay_equal(tmp_path, codec):
    """A sum of three depends on its order, and that on where in a stage's gradients a parameter lies; so do codes."""
    how = pipelines(AverageGradients(codec=codec), devices=6, slicing=Uniform(1))
    forked(Scaled(), how, tmp_path, max_steps=2, limit_val_batches=0, callbacks=[Copies(tmp_path)])
    first, *others = [torch.load(tmp_path / f"{rank}.pt") for rank in range(6)]
    assert first["embedding"].numel() == VOCABULARY * WIDTH
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


@pytest.mark.threads
def test_a_gradient_that_only_some_have_counts_as_zero_of_the_others():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 4)]
    own = [[torch.ones(2), None, None], [None, torch.full((3,), 4.0), None]]

    def worker(group):
        bond = AverageGradients().join(*[lambda: GlooTransport(group)] * 2, torch.device("cpu"), per_node=1)
        return bond.gradients(own[group.rank()], parameters)

    for first, second, nobody in world(2, worker):
        assert first.tolist() == [0.5] * 2
        assert second.tolist() == [2.0] * 3
        assert nobody is None


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class Keeping(ModelCheckpoint):
    """After every third step."""

    def __init__(self, folder):
        super().__init__(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)


def run(folder, checkpoint=None, **options):
    make = Language(ordered=False)
    callbacks = {"enable_checkpointing": True, "callbacks": [Keeping(folder)]}
    settings = {"limit_train_batches": 3, "max_steps": 6, "gradient_clip_val": CLIP, **callbacks, **options}
    return forked(make, pipelines(GossipReplicas(topology=Complete())), folder, checkpoint, **settings)


def test_resume_is_exact_and_the_file_is_the_mean(tmp_path):
    wanted, losses, _ = run(tmp_path / "a")
    path = tmp_path / "a" / "step=3.ckpt"
    assert len(list((tmp_path / "a" / ".workers" / "step=3").iterdir())) == 4
    saved = torch.load(path, weights_only=True)
    found, found_losses, _ = run(tmp_path / "b", str(path))
    assert found_losses == losses[3:]
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert distance(saved["state_dict"], by_hand(delay=1, steps=3)) < 1e-9
    assert distance(Language.load_from_checkpoint(path, weights_only=True).state_dict(), saved["state_dict"]) == 0

    next((tmp_path / "a" / ".workers" / "step=3").iterdir()).unlink()  # then all start from the mean
    _, from_mean, _ = run(tmp_path / "c", str(path), max_steps=4)
    assert len(from_mean) == 1
    assert from_mean != losses[3:4]


class Poison(Callback):
    """Worker 3, the second stage of the second pipeline, holds a bad number after the last update."""

    def __init__(self, bad):
        self._bad = bad

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 3 and trainer.global_rank == 3:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = self._bad


def poisoned(folder, bad, replicas):
    options = {"limit_train_batches": 3, "max_steps": 3, "gradient_clip_val": CLIP, "enable_checkpointing": True}
    forked(Language(ordered=False), pipelines(replicas), folder, callbacks=[Keeping(folder), Poison(bad)], **options)
    return torch.load(folder / "step=3.ckpt", weights_only=True)["state_dict"]


def test_a_poisoned_pipeline_stays_out_of_the_mean(tmp_path):
    saved = poisoned(tmp_path, float("nan"), GossipReplicas(topology=Complete(), delay=0))
    assert distance(saved, by_hand(delay=0, steps=3)) < 1e-9


def test_pipelines_that_must_be_equal_and_are_not_save_nothing(tmp_path):
    with pytest.raises(RuntimeError, match=r"FloatingPointError: worker 3's .* worker 1's .* they must be equal"):
        poisoned(tmp_path, 30.0, AverageGradients())
    assert not (tmp_path / "step=3.ckpt").exists()


# ---- the bond alone -------------------------------------------------------------------------------------------------


class Point(torch.nn.Module):
    def __init__(self, dim=5):
        super().__init__()
        self.x = torch.nn.Parameter(torch.linspace(-1, 1, dim, dtype=torch.float64))


def gradient(x, step):
    """Of another minimum and curvature on each worker."""
    ranks = torch.arange(x.shape[0], dtype=torch.float64)[:, None]
    return (1 + 0.1 * ranks) * (x - ranks - 0.3 * step)


RULES = [
    (GossipReplicas(), 3),
    (GossipReplicas(topology=Hypercube(), delay=0), 4),
    (GossipReplicas(topology=Ring(), combine=Gossip(rate=0.4), delay=2), 4),
    (GossipReplicas(topology=IRREGULAR, combine=PushSum()), 5),
]


@pytest.mark.threads
@pytest.mark.parametrize(("how", "size"), RULES, ids=lambda value: str(value)[:40])
def test_a_bond_equals_the_simulation(how, size):
    def worker(group):
        point = Point()
        optimizer = torch.optim.SGD(point.parameters(), lr=0.1)
        bond = how.join(*[lambda: GlooTransport(group)] * 2, torch.device("cpu"), per_node=1)
        bond.prepare([optimizer], point)
        for step in range(6):
            x = torch.zeros(size, 5, dtype=torch.float64)
            x[group.rank()] = point.x.detach()
            point.x.grad = gradient(x, step)[group.rank()]
            optimizer.step()
            bond.updated(optimizer, epoch=0)
        last = point.x.detach().clone()
        bond.settle()
        share = bond.share()
        bond.release()
        return last, share

    how.check(size, 1)
    found, shares = zip(*world(size, worker), strict=True)
    x0 = Point().x.detach().expand(size, -1)
    wanted = simulate(how.topology.placed(1), how.combine, gradient, x0, 6, 0.1, how.delay)
    torch.testing.assert_close(torch.stack(found), wanted[-1], rtol=1e-12, atol=1e-12)
    assert None in shares or sum(shares) == pytest.approx(1)
    assert (None in shares) != isinstance(how.combine, PushSum)


# ---- what cannot be -------------------------------------------------------------------------------------------------


def test_a_negative_delay_is_refused():
    with pytest.raises(ValueError, match="delay must be at least 0, got -1: 0 blocks"):
        GossipReplicas(delay=-1)


def test_a_rule_that_measures_a_distance_is_refused():
    with pytest.raises(ValueError, match=r"ConsensusControl\(.*would diverge; use Gossip"):
        GossipReplicas(combine=ConsensusControl(target=0.05)).check(4, per_node=1)


def test_a_topology_that_cannot_serve_the_pipelines_is_refused(tmp_path):
    how = pipeline(3, stages=1, replicas=GossipReplicas(topology=Hypercube()))
    with pytest.raises(RuntimeError, match=r"Hypercube.* 3"):
        forked(Language(), how, tmp_path)


class Shorter(Language):
    """The second pipeline has half of the batches."""

    def train_dataloader(self):
        return self._loader(24 if self.global_rank < 2 else 12)

    def training_step(self, batch, batch_idx):
        ids, mask, labels = batch
        return token_mean(self.model(input_ids=ids, attention_mask=mask).logits, labels)


def test_pipelines_with_unequal_batches_end_with_the_remedy(tmp_path):
    options = {"use_distributed_sampler": False, "limit_train_batches": 1.0, "max_steps": -1, "max_epochs": 1}
    with pytest.raises(RuntimeError, match=r"ended its epoch after 4 steps while another goes on.*number of batches"):
        forked(Shorter(), pipelines(AverageGradients()), tmp_path, **options)


class Slow(Callback):
    """The first pipeline is busy for long after its last batch, while the second has ended its epoch."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_rank == 0 and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            time.sleep(PATIENCE_SECONDS + 5 * ALERT_SECONDS)


def test_a_pipeline_that_is_busy_after_its_last_update_asks_for_no_further_one(tmp_path):
    how = pipeline(2, stages=1, replicas=AverageGradients())
    _, losses, _ = forked(Language(), how, tmp_path, callbacks=[Slow()], max_steps=2, limit_train_batches=2)
    assert len(losses) == 2
