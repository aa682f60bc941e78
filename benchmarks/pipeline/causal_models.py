"""Which causal language models of the installed `transformers` a token pipeline slices: the table of the docs.

    python benchmarks/pipeline.py causal_models > docs/causal-models.md

Each class is tried as at set-up, with its default configuration. Names as arguments: only these, as verdicts.
"""

import sys
from collections.abc import Iterator

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_decentral.pipeline.compute.causal.causal_model import LEFT, PACKING, RIGHT, ROUTING
from lightning_decentral.pipeline.compute.causal.trial import TrialOutcome, judged

COMPLETED = {
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}
"""What default configurations leave open and every published one says."""

HEAD = """# Causal models that are sliced

`python benchmarks/pipeline.py causal_models` tests a small model of each class of `transformers` {version}, with the
class's default configuration. It must have the same loss and gradients in three stages and three slices as whole, in
float64. At set-up the same test with your model's configuration decides. See [the token
pipeline](token-pipeline.md#which-models).

![Four slices of a sequence: each attends to itself, and to what the KV cache has of those before](images/cache.svg)

**{sliced} of {all} are sliced.** *yes*: equal results; *refused*: such a call is an error; *-*: it has no routers.
With eager attention a padding token on the left attends to all tokens, even later ones, and predicts the first token.
Such calls need `sdpa`, where the class has it, or padding on the right.

| attention | padding left | packed sequences | router loss | classes |
| --- | --- | --- | --- | --- |"""
MOST = 100
"""Characters of a reason."""
ALONE = "another reason: `python benchmarks/pipeline.py causal_models NAME`"


def tried(name: str) -> tuple[str, str, TrialOutcome]:
    """(class, kind of attention, verdict) of one entry of the mapping."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    config = CONFIG_MAPPING[name](**COMPLETED.get(name, {})).get_text_config(decoder=True)
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    return kind.__name__, config._attn_implementation, judged(kind, config)


def cells(verdict: TrialOutcome, routed: bool) -> Iterator[str]:
    assert RIGHT not in verdict.refused  # a column with yes in all rows
    for form in (LEFT, PACKING):
        yield "refused" if form in verdict.refused else "yes"
    yield "refused" if ROUTING in verdict.refused else "yes" if routed else "-"


def table(names: list[str]) -> str:
    sliced: dict[str, str] = {}
    others: dict[str, str] = {}
    for name in names:
        try:
            kind, attention, verdict = tried(name)
        except Exception as error:  # of several configurations in one, or of none
            kind, attention, verdict = (
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name],
                "",
                TrialOutcome(None, {"": _line(error)}),
            )
        if verdict.anatomy is None:
            others[kind] = shortened(verdict.refused[""])
        else:
            sliced[kind] = " | ".join([attention, *cells(verdict, bool(verdict.anatomy.routers))])
        print(kind, verdict.refused, file=sys.stderr, flush=True)
    others = {kind: why for kind, why in others.items() if kind not in sliced}
    head = HEAD.format(version=transformers.__version__, sliced=len(sliced), all=len(sliced) + len(others))
    return "\n".join([head, *grouped(sliced), "\n## Refused\n\n| why | classes |\n| --- | --- |", *refused(others)])


def grouped(verdicts: dict[str, str]) -> list[str]:
    """A row for each verdict with its classes, that of most classes first."""
    classes: dict[str, list[str]] = {}
    for kind in sorted(verdicts):
        classes.setdefault(verdicts[kind], []).append(f"`{kind}`")
    rows = sorted(classes.items(), key=lambda row: (-len(row[1]), row[0]))
    return [f"| {verdict} | {', '.join(kinds)} |" for verdict, kinds in rows]


def refused(verdicts: dict[str, str]) -> list[str]:
    """The same of reasons; those of one class each share a row."""
    alone = {kind for kind, why in verdicts.items() if list(verdicts.values()).count(why) == 1}
    return grouped({kind: ALONE if kind in alone else why for kind, why in verdicts.items()})


def shortened(why: str) -> str:
    text = why.removeprefix("a small copy of it raises ")
    return text if len(text) <= MOST else f"{text[:MOST].rpartition(' ')[0]} ..."


def _line(error: Exception) -> str:
    return f"its default configuration: {type(error).__name__}: {' '.join(str(error).split())[:120]}"


def main() -> None:
    transformers.logging.set_verbosity_error()
    print(table(sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
