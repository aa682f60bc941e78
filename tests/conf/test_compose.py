"""Whole configurations: the commands of the documentation, every choice, every combination of a gossip strategy."""

from collections.abc import Iterator
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import Asynchronous, Elastic, ElasticGossipStrategy
from tests.conf.groups import CONF, choices, nodes, parameters, unowned

GROUPS = [
    "recipe",
    "model",
    "data",
    "optimizer",
    "scheduler",
    "trainer",
    "logger",
    "callbacks",
    "experiment",
    "strategy",
]
MUST_BE_GIVEN = {
    "hub_image": ["data.source.path=imagefolder", "data.num_labels=2"],
    "hub_text": ["data.source.path=text"],
    "per_worker": ["strategy.depth.fractions=[1.0,0.5]"],
    "from_graph": ["strategy.topology.edges=[[0,1]]"],
}
GIVEN_BY_TRAIN = {"optimizer", "scheduler", "params", "total_steps", "strategy", "callbacks", "logger"}
GIVEN_BY_THE_CLASS = {"root_dir"}  # which TensorBoardLogger gives to its base, from save_dir


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    cfg = compose("train", ["hydra.runtime.output_dir=/nowhere", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg


def checked(*overrides: str) -> dict:
    """The resolved configuration, after each of its nodes was found to name all that its constructor needs."""
    cfg = composed(*overrides)
    tree = {key: OmegaConf.to_container(cfg[key], resolve=True, throw_on_missing=True) for key in cfg
            if key != "hydra" and isinstance(cfg[key], DictConfig)}  # fmt: skip
    for path, node in nodes(tree):
        accepted = parameters(get_object(node["_target_"]))
        required = {name for name, p in accepted.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        assert unowned(node) == set(), path
        assert required - set(node) <= GIVEN_BY_TRAIN | GIVEN_BY_THE_CLASS, path
    return tree


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in sorted(choices(group))])
def test_every_choice_composes(choice):
    checked(choice, *MUST_BE_GIVEN.get(choice.partition("=")[2], []))


@pytest.mark.parametrize("command", [
    "recipe=gpt strategy=gossip strategy/topology=ring optimizer=adamw trainer.devices=4",
    "recipe=vit strategy=gossip strategy/topology=ring strategy.combine.rate=0.5",
    "recipe=vit optimizer.lr=1e-3 model.config.hidden_size=64",
    "recipe=resnet data=cifar10 logger=wandb logger.offline=true scheduler=linear",
    "recipe=gpt data=wikitext data/tokenizer=pretrained data.tokenizer.name=gpt2",
    "strategy=gossip strategy/topology=every strategy.topology.steps=4 strategy.delay=4",
    "strategy=gossip strategy/combine=push_sum strategy/weights=out_degree strategy/topology=star",
    "strategy=gossip strategy/topology=ring +strategy/combine/rate=learning_rate_power",
    "strategy=gossip strategy/codec=int8 strategy.codec.block=512",
    "recipe=gpt experiment=gossip_muon trainer.devices=4",
    "recipe=gpt experiment=compressed_muon trainer.devices=4",
    "strategy=gossip strategy/codec=difference_compression strategy/codec@strategy.codec.inner=top_k",
    "experiment=demo trainer.devices=2 data=cifar10",
    "experiment=demo_pipeline trainer.devices=4 strategy.stages=2",
    "strategy=token_pipeline strategy.stages=2 trainer.devices=8 strategy/replicas=gossip_replicas"
    " strategy/topology@strategy.replicas.topology=ring strategy.replicas.delay=0",
    "recipe=gpt strategy=token_pipeline strategy/slicing=uniform strategy.slicing.n=4 strategy.microbatches=2",
    "experiment=demo_partial trainer.devices=4",
    "strategy=compressed strategy/codec=bfloat16 trainer.devices=2",
    "strategy=partial_backprop strategy.cuts=3 strategy/depth=staircase strategy/balance=seconds trainer.devices=4",
    "strategy=partial_backprop strategy/depth/order=random strategy.depth.warm_up=50 strategy/absent=decay",
    "strategy=gossip +callback@callbacks.cut=partial_backward +callback@callbacks.watch=partial_backprop_monitor",
    "+callback@callbacks.second=consensus_monitor ~callbacks.start_summary",
])  # fmt: skip
def test_documented_command_composes(command):
    checked(*command.split())


def test_recipe_chooses_and_command_line_wins():
    assert composed("recipe=gpt").data._target_.endswith("Pydoc")
    assert composed("recipe=resnet", "data=cifar10").data.num_labels == 10
    assert composed("experiment=demo", "trainer.devices=2").trainer.devices == 2
    demo, before = composed("experiment=demo"), composed("experiment=demo_ddp")
    assert demo.callbacks == before.callbacks
    assert demo.callbacks.report._target_.endswith("Report")
    assert demo.trainer == before.trainer
    assert [one.strategy._target_.rpartition(".")[2] for one in (before, demo)] == ["DDPStrategy", "GossipStrategy"]
    assert (demo.optimizer._target_, demo.optimizer.lr, demo.optimizer.momentum) == (
        "lightning_decentral.optim.Muon",
        0.02,
        0.8,
    )


@pytest.mark.parametrize("recipe", sorted(choices("recipe")))
def test_published_settings_of_gossip_are_one_word_for_every_recipe(recipe):
    """2410.11998, 16 workers."""
    plain, cfg = composed(f"recipe={recipe}"), composed(f"recipe={recipe}", "experiment=decentralized_adam")
    assert cfg.optimizer._target_ == "torch.optim.Adam"
    assert list(cfg.optimizer.betas) == [0.974, 0.999]
    assert cfg.trainer.gradient_clip_val == 0.5
    assert isinstance(instantiate(cfg.strategy, _convert_="all"), GossipStrategy)
    assert (cfg.model, cfg.data) == (plain.model, plain.data)
    accumulated = composed(f"recipe={recipe}", "strategy=gossip", "optimizer=accum_adamw").optimizer
    assert list(accumulated.betas) == pytest.approx([0.9**4, 0.999**4], abs=1e-3)
    assert accumulated.window == 4


@cache
def chosen(group, name):
    """The node of one choice; `composed` is slow."""
    return composed("strategy=gossip", f"strategy/{group}={name}", *MUST_BE_GIVEN.get(name, [])).strategy[group]


@pytest.mark.sampled
@pytest.mark.parametrize(("turn", "topology"), [*enumerate(sorted(choices("strategy/topology")))])
def test_every_gossip_strategy_can_be_constructed(turn, topology):
    """Every pair of choices: weights are dealt out, from another one on for each topology."""
    strategy, rows = composed("strategy=gossip").strategy, sorted(choices("strategy/weights"))
    assert len(rows) <= min(len(choices("strategy/combine")), len(choices("strategy/topology")))
    for number, combine in enumerate(sorted(choices("strategy/combine"))):
        weights = rows[(turn + number) % len(rows)]
        named = {"topology": topology, "combine": combine, "weights": weights}
        for group, name in named.items():
            strategy[group] = chosen(group, name)
        made = instantiate(strategy, _convert_="all")
        assert isinstance(made, GossipStrategy)
        for group in named:
            assert get_object(strategy[group]._target_) is type(getattr(made, group))


@pytest.mark.parametrize("island", sorted(choices("strategy/island")))
def test_every_island_can_be_constructed(island):
    cfg = composed("strategy=gossip", f"strategy/island={island}")
    strategy = instantiate(cfg.strategy, _convert_="all")
    assert type(strategy.island) is get_object(cfg.strategy.island._target_)


def test_gossip_can_be_made_elastic():
    strategy = composed("strategy=gossip", "strategy/elastic=elastic", "strategy.elastic.workers=[1,4]").strategy
    made = instantiate(strategy, _convert_="all")
    assert isinstance(made, ElasticGossipStrategy)
    assert made.elastic == Elastic(workers=(1, 4))


def test_elastic_rounds_can_be_asynchronous():
    words = "strategy=gossip", "strategy/elastic=elastic", "+strategy/elastic/asynchronous=asynchronous"
    made = instantiate(composed(*words, "strategy.elastic.asynchronous.behind=9").strategy, _convert_="all")
    assert made.elastic.asynchronous == Asynchronous(behind=9)


@pytest.mark.parametrize("rate", sorted(choices("strategy/combine/rate")))
def test_every_rate_can_be_put_in_place_of_a_number(rate):
    cfg = composed("strategy=gossip", f"+strategy/combine/rate={rate}")
    strategy = instantiate(cfg.strategy, _convert_="all")
    schedule = strategy.combine.rate
    assert get_object(cfg.strategy.combine.rate._target_) is type(schedule)


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(choices("strategy/codec")))
def test_every_codec_can_be_chosen_or_wrapped(name):
    inner = "strategy/codec@strategy.codec.inner"
    alone = composed("strategy=gossip", f"strategy/codec={name}")
    node = instantiate(alone.strategy.codec)
    wrapping = f"{inner}={'int8' if node.remembers else name}"
    wrapped = composed("strategy=gossip", "strategy/codec=difference_compression", wrapping)
    assert instantiate(wrapped.strategy, _convert_="all").codec.inner.remembers is False
    if node.complete:
        assert instantiate(alone.strategy, _convert_="all").codec == node
    else:
        with pytest.raises(Exception, match="by itself would lose too much"):
            instantiate(alone.strategy, _convert_="all")


PIPELINE = ("slicing", "schedule", "partition", "activations", "boundary", "replicas")
GIVEN = {"given": "strategy.slicing.lengths=[3,2]", "counted": "strategy.partition.blocks=[1,1]"}


@pytest.mark.sampled
@pytest.mark.parametrize("group", PIPELINE)
def test_every_token_pipeline_can_be_constructed(group):
    for name in sorted(choices(f"strategy/{group}")):
        given = [GIVEN[name]] if name in GIVEN else []
        cfg = composed("strategy=token_pipeline", f"strategy/{group}={name}", *given)
        strategy = instantiate(cfg.strategy, _convert_="all")
        value = getattr(strategy, group)
        assert get_object(cfg.strategy[group]._target_) is type(value)


@pytest.mark.sampled
@pytest.mark.parametrize("words", [
    *([f"strategy/depth={name}"] for name in sorted(choices("strategy/depth"))),
    *([f"strategy/depth/order={name}"] for name in sorted(choices("strategy/depth/order"))),
    *([f"strategy/{g}={name}"] for g in ("balance", "absent") for name in sorted(choices(f"strategy/{g}"))),
], ids=str)  # fmt: skip
def test_every_partial_strategy_can_be_constructed(words):
    cfg = composed("strategy=partial_backprop", *words, *MUST_BE_GIVEN.get(words[0].partition("=")[2], []))
    strategy = instantiate(cfg.strategy, _convert_="all")
    assert isinstance(strategy, PartialBackpropStrategy)
    for parameter in ("depth", "balance", "absent"):
        value = getattr(strategy, parameter)
        assert get_object(cfg.strategy[parameter]._target_) is type(value)


RUN_HERE = ("demo", "gossip_muon", "compressed_muon", "outer_muon")


def test_experiments_that_were_not_run_say_so():
    for file in (CONF / "experiment").glob("*.yaml"):
        assert ("NOT RUN HERE" in file.read_text()) == (not file.stem.startswith(RUN_HERE))
