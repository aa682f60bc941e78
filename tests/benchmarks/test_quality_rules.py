"""Rules on a transformer: what each is run with, and in which order."""

from quality.rules import OPTIMIZERS, RULES, SEEDS, better, first, further, table, words


def ran(seed: int, muon: float, other: float) -> dict[str, float]:
    losses = {"Muon": muon, "AccumAdamW": other}
    return {f"{rule}, {optimizer}, {seed}": losses[optimizer] for rule in RULES for optimizer in OPTIMIZERS}


def test_ddp_has_its_own_momentum_and_a_rule_may_take_its_place() -> None:
    assert words("ddp", "Muon")[-1] == "optimizer.momentum=0.8"
    assert words("Gossip", "Muon") == ["strategy=gossip", "optimizer=muon", "optimizer.momentum=0.9"]
    assert words("QuasiGlobalMomentum", "Muon")[-1] == "optimizer.momentum=0"
    assert words("Gossip, delay 0", "AccumAdamW")[-1] == "strategy.delay=0"


def test_all_run_with_the_first_seed_and_the_better_ones_with_the_others() -> None:
    assert len(first({})) == len(RULES) * len(OPTIMIZERS)
    runs = {**ran(SEEDS[0], 1.2, 1.3), "ddp, AccumAdamW, 0": 1.1}
    assert first(runs) == []
    assert (better(runs, "ddp"), better(runs, "Gossip")) == ("AccumAdamW", "Muon")
    assert further(runs) == [(rule, better(runs, rule), seed) for seed in SEEDS[1:] for rule in RULES]
    assert ("Gossip", "Muon", 1) not in further({**runs, "Gossip, Muon, 1": 1.2})


def test_a_rule_is_compared_with_ddp_on_the_seeds_that_it_has() -> None:
    runs = {**ran(SEEDS[0], 1.25, 1.5), "ddp, Muon, 0": 1.0, "ddp, Muon, 1": 2.0}
    page = table(runs)
    assert "| ddp | Muon | 2 | 1.5000 ± 0.7071 |  | 1.5000 |" in page
    assert "| Gossip | Muon | 1 | 1.2500 | +0.2500 | 1.5000 |" in page
