"""Seconds to the same accuracy on a slow network: `ddp` against gossip, the recipes' own models and data.

    sudo python benchmarks/network.py accuracy

Hosts are network namespaces with links of the given rate (`cluster.py`). Every method trains the same steps of the same
batches under the same schedule. Nothing is simulated but the network: computation is real, on processors that all hosts
share. At marks each host copies its model and trains on; afterwards, off the clock, the mean of these copies is
evaluated on test examples. The clock runs from the first host's first step to the end of a step on the last host.

Writes `results/cluster-accuracy-<hardware>.json` and `.png`; finished runs are kept in the first. Needs root and
iproute2.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from common.hardware import description, sentence, slug
from common.paths import RESULTS, command
from common.quiet_recipe import composed
from lightning_decentral.recipes.learner import Learner
from lightning_decentral.recipes.train import build_model
from lightning_decentral.shared.plan.figure import new_figure
from lightning_decentral.shared.wire.mean import of_mean
from network.cluster import Cluster, bits_per_second, cluster
from network.speed import seconds_per_step

EXAMPLES = 360
"""Test examples: all of digits', the first of pydoc's, whose order is random."""
WARM_UP = 10
ALONE_STEPS = 50


class Recipe(NamedTuple):
    """Recipe with its number of steps, the distance of its marks and the scores to reach.

    `sign` is -1 where a lower score is better. Of a step a simulated accelerator takes `asleep` seconds; where it is
    None, the processor computes it.
    """

    words: list[str]
    steps: int
    every: int
    score: str
    sign: int
    targets: tuple[float, ...]
    methods: dict[str, list[str]]
    asleep: float | None = None


PLAIN, INT8 = ["strategy=gossip"], ["strategy=gossip", "strategy/codec=int8"]
# For GPT the optimizer with which gossip reaches ddp at equal steps (`quality.py`); ddp is given it, too.
ON_TEXT = {
    "ddp": ["strategy=ddp"],
    "ddp, AccumAdamW": ["strategy=ddp", "optimizer=accum_adamw"],
    "gossip, AccumAdamW": [*PLAIN, "optimizer=accum_adamw"],
    "gossip, int8, AccumAdamW": [*INT8, "optimizer=accum_adamw"],
}
LOSS = "test loss in nats per byte"
CROSS_ENTROPY = "test cross-entropy"
"""Of classifiers, whose own score is their accuracy."""
RECIPES = {
    "resnet": Recipe(
        words=["recipe=resnet", "model.config.hidden_sizes=[32,64,128]"],
        steps=200,
        every=5,
        score="test accuracy",
        sign=1,
        targets=(0.90, 0.95, 0.97),
        methods={"ddp": ["strategy=ddp"], "gossip": PLAIN, "gossip, int8": INT8},
    ),
    # The recipe's own model and, within three steps, its three epochs.
    "gpt": Recipe(
        words=["recipe=gpt"], steps=1080, every=40, score=LOSS, sign=-1, targets=(1.7, 1.5, 1.45), methods=ON_TEXT
    ),
    "larger-gpt": Recipe(
        words=["recipe=gpt", "model.config.n_embd=128", "model.config.n_layer=4"],
        steps=280,
        every=20,
        score=LOSS,
        sign=-1,
        targets=(2.6, 2.5, 2.2),
        methods=ON_TEXT,
    ),
}


def scores(words: list[str], seed: int, rows: Tensor, kind: str = "") -> list[float]:
    """Mean score, or cross-entropy, of the test examples for each row, which is a model, [marks, numbers]."""
    cfg = composed(words, seed)
    data = instantiate(cfg.data, _convert_="all")
    model = build_model(cfg, data.sizes).eval()
    data.setup("test")
    loader = DataLoader(Subset(data.splits["test"], range(EXAMPLES)), batch_size=EXAMPLES // 4)
    return [_score(model, row, loader, kind) for row in rows]


@torch.no_grad()
def _score(model: Learner, row: Tensor, loader: DataLoader[Any], kind: str) -> float:
    tensors = of_mean([model.network])[0]
    for tensor, part in zip(tensors, row.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    if kind == CROSS_ENTROPY:
        return statistics.mean(float(cross_entropy(model(inputs), labels)) for inputs, labels in loader)
    return float(torch.cat([model.score(batch) for batch in loader]).mean())


def mean_rows(folder: Path, place: str, workers: int) -> Tensor:
    """The mean over the workers of what each kept, [marks, numbers]."""
    return torch.stack([torch.load(folder / f"{place}-{rank}.pt") for rank in range(workers)]).mean(0)


def seconds_at(records: list[dict[str, Any]], steps: list[int]) -> list[float]:
    """Return the seconds from the first worker's start to the last one's end of each of these steps."""
    start = min(record["begin"] for record in records)
    return [max(record["ends"][step - 1] for record in records) - start for step in steps]


def measure(
    hosts: Cluster, recipe: Recipe, options: argparse.Namespace, seed: int, alone_steps: int = ALONE_STEPS
) -> dict[str, Any]:
    """{"alone": seconds per step without a network, "methods": what each reached when}; one launch for all."""
    plan = {"words": recipe.words, "methods": list(recipe.methods.values()), "hosts": hosts.hosts, "seed": seed}
    plan |= {"steps": options.steps or recipe.steps, "every": recipe.every, "alone_steps": alone_steps}
    plan |= {"score": recipe.score, "asleep": recipe.asleep}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        codes = hosts.run([*command("network", "accuracy_worker"), name], seconds=options.longest)
        if any(codes):
            raise SystemExit(f"{hosts.hosts} hosts ended with {codes}")
        torch.set_num_threads(os.cpu_count() or 1)
        rows = [json.loads((folder / f"alone-{host}.json").read_text()) for host in range(hosts.hosts)]
        return {
            "alone": statistics.mean(seconds_per_step([row], WARM_UP) for row in rows),
            "methods": {m: found(folder, str(place), plan) for place, m in enumerate(recipe.methods)},
        }


def found(folder: Path, place: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Steps, seconds and score at each mark; seconds and bytes per step; bytes of the parameters."""
    records = [json.loads((folder / f"{place}-{rank}.json").read_text()) for rank in range(plan["hosts"])]
    steps = list(range(plan["every"], plan["steps"] + 1, plan["every"]))
    rows = mean_rows(folder, place, plan["hosts"])
    return {
        "steps": steps,
        "seconds": seconds_at(records, steps),
        "scores": scores(plan["words"], plan["seed"], rows, plan["score"]),
        "seconds_per_step": seconds_per_step([record["ends"] for record in records], warm_up(len(records[0]["ends"]))),
        "bytes_sent": records[0]["sent"],
        "bytes": records[0]["bytes"],
    }


def warm_up(steps: int) -> int:
    """Steps before the clock: 10 or a few more, so that whole updates are timed, also where one takes four steps."""
    return WARM_UP + (steps - WARM_UP) % 4


def reached(recipe: Recipe, runs: list[dict[str, Any]], target: float) -> tuple[float, float] | None:
    """Seconds and steps of the first mark at the target or beyond, means over runs; None where one didn't get there."""
    places = [
        next((i for i, score in enumerate(run["scores"]) if recipe.sign * (score - target) >= 0), None) for run in runs
    ]
    both = [(run["seconds"][i], run["steps"][i]) for run, i in zip(runs, places, strict=True) if i is not None]
    if len(both) < len(runs):
        return None
    seconds, steps = zip(*both, strict=True)
    return statistics.mean(seconds), statistics.mean(steps)


def of_method(results: dict[str, Any], recipe: str, method: str) -> list[dict[str, Any]]:
    """Its run with each seed."""
    return [run["methods"][method] for key, run in results["runs"].items() if key.startswith(f"{recipe} ")]


def rows_of(results: dict[str, Any], name: str) -> list[list[str]]:
    """One row per method; the ratio is to the seconds of the fastest form of ddp to the last target."""
    recipe, rows = RECIPES[name], []
    by_method = {method: of_method(results, name, method) for method in recipe.methods}
    times = {method: [reached(recipe, runs, target) for target in recipe.targets] for method, runs in by_method.items()}
    last = {method: found[-1][0] for method, found in times.items() if found[-1]}
    ddp = min((seconds for method, seconds in last.items() if method.startswith("ddp")), default=None)
    for method, runs in by_method.items():
        sent, step = runs[0]["bytes_sent"], statistics.mean(run["seconds_per_step"] for run in runs)
        cells = [method, f"{sent / 1e6:.2f}", f"{8 * sent / bits_per_second(results['rate']):.3f}", f"{step:.3f}"]
        cells += [f"{time[0]:.1f} s ({time[1]:.0f})" if time else "not reached" for time in times[method]]
        ratio = f"{ddp / last[method]:.2f}" if ddp and method in last else ""
        rows.append([*cells, ratio, f"{statistics.mean(run['scores'][-1] for run in runs):.3f}"])
    return rows


def section(results: dict[str, Any], name: str) -> str:
    """Markdown of a recipe."""
    recipe = RECIPES[name]
    runs = [run for key, run in results["runs"].items() if key.startswith(f"{name} ")]
    first = next(iter(runs[0]["methods"].values()))
    compute = statistics.mean(run["alone"] for run in runs)
    about = f"{name}: {first['bytes'] / 1e6:.2f} MB of parameters; a step of a host by itself, all hosts at once, "
    about += f"takes {compute:.3f} s; {first['steps'][-1]} steps, {len(runs)} seed(s). "
    about += f"Seconds (steps) to a {recipe.score} of"
    head = ["method", "MB sent per step", "s of these at the rate", "s per step"]
    head += [*map(str, recipe.targets), "times faster than ddp to the last", f"{recipe.score} at the end"]
    lines = [head, ["---"] * len(head), *rows_of(results, name)]
    return "\n".join([f"{about}:", "", *("| " + " | ".join(cells) + " |" for cells in lines)])


def draw(results: dict[str, Any], names: list[str], path: Path) -> None:
    """A column for each recipe: the score over seconds, and over steps."""
    figure = new_figure(4.5 * len(names), 6)
    panels = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        recipe = RECIPES[name]
        for axes, unit in zip(panels[:, column], ("seconds", "steps"), strict=True):
            for index, method in enumerate(recipe.methods):
                for seed, run in enumerate(of_method(results, name, method)):
                    label = method if seed == 0 else None
                    axes.plot(run[unit], run["scores"], color=f"C{index}", linewidth=1.2, label=label)
            axes.axhline(recipe.targets[-1], color="grey", linewidth=0.8, linestyle=":")
            axes.set(xlabel=unit, ylabel=recipe.score)
        panels[0, column].set_title(name)
        panels[0, column].legend(fontsize=7)
    figure.savefig(path)


def names_of(results: dict[str, Any]) -> list[str]:
    """Recipes that have run."""
    return [name for name in RECIPES if any(key.startswith(f"{name} ") for key in results["runs"])]


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    about = f"{results['hosts']} hosts of one processor thread each at {results['rate']}, namespaces on one machine: "
    about += f"{sentence(results['hardware'])}."
    return "\n\n".join([about, *(section(results, name) for name in names_of(results))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=["resnet", "gpt"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="instead of the recipe's own number; give --results, too")
    parser.add_argument("--longest", type=float, default=900.0, help="seconds after which a launch has failed")
    parser.add_argument("--results", type=Path, default=RESULTS / f"cluster-accuracy-{slug()}.json")
    options = parser.parse_args()
    path: Path = options.results
    setting = {"hosts": options.hosts, "rate": options.rate}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    if results["runs"] and any(results[name] != value for name, value in setting.items()):
        raise SystemExit(f"{path} holds other hosts or another rate: give --results another file, or remove it")
    results |= {"hardware": description(), **setting}
    todo = [
        (name, seed) for seed in options.seeds for name in options.recipes if f"{name} {seed}" not in results["runs"]
    ]
    with cluster(options.hosts, options.rate, name="accuracy") as hosts, Progress() as progress:
        for name, seed in progress.track(todo, description="runs"):
            results["runs"][f"{name} {seed}"] = measure(hosts, RECIPES[name], options, seed)
            path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, names_of(results), path.with_suffix(".png"))
    Console().print(Markdown(page(results)))
