"""`lightning-decentral cuts` prints what the library finds."""

import pytest

from lightning_decentral.cli.cuts import cut_plan
from lightning_decentral.recipes import command as cli


@pytest.mark.sampled
@pytest.mark.parametrize(("recipe", "words", "kind", "tied"), [
    ("vit", ["strategy.cuts=2"], "3 x ViTLayer", 0),
    ("gpt", ["model.config.n_layer=3"], "3 x GPT2Block", 1),
    ("resnet", ["strategy/balance=parameters"], "3 x ResNetStage", 0),
])  # fmt: skip
def test_a_recipe(capsys: pytest.CaptureFixture[str], recipe: str, words: list[str], kind: str, tied: int) -> None:
    plan = cut_plan(cli.RECIPES, [f"recipe={recipe}", *words])
    assert str(plan.chain).startswith(kind)
    names = [n for n, v in plan.judged[0].verdicts.items() if v.value == "tied"]
    assert len(names) == tied
    cli.main(["cuts", f"recipe={recipe}", *words])
    printed = capsys.readouterr().out
    for boundary in plan.boundaries:
        assert f"before {boundary}" in printed
    assert f"│ {plan.segments} " in printed


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"error: 7 cuts need 8 blocks, there are 3 .*give fewer cuts"):
        cli.main(["cuts", "recipe=vit", "strategy.cuts=7"])
    with pytest.raises(SystemExit, match=r"^error: cuts are .* strategy=partial_backprop: leave out strategy=gossip$"):
        cli.main(["cuts", "recipe=vit", "strategy=gossip"])
    with pytest.raises(SystemExit):
        cli.main(["coffee"])
