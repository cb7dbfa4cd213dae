"""The demonstration from end to end."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import pdp_fx
from pdp_fx.data import Digits, split_digits
from pdp_fx.demo.measure import one_thread
from pdp_fx.demo.net import DigitNet
from pdp_fx.demo.plots import plot_accuracy, plot_flips, plot_sparsity, plot_weights
from pdp_fx.demo.summary import Summary, summarise
from pdp_fx.demo.table import table
from pdp_fx.demo.train import Recipe
from pdp_fx.demo.variants import VARIANTS, Run, Variant, run_variant
from pdp_fx.spec import Channels, PruneSpec, Unstructured

LATENCY_ROUNDS = 200


@one_thread()
def run(out: Path, epochs: int | None = None, seeds: int = 3) -> None:
    """Train, prune, convert and compare; print what happens, and write models, numbers and plots to `out`.

    Args:
        out: a folder, made if it does not exist; files of earlier runs are overwritten.
        epochs: how long every variant trains, the recipe's number if None; the pruning ramp is fitted to it.
        seeds: how many times every variant is trained.
    """
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    digits = split_digits()
    _show_rewrite(digits)
    recipe = Recipe() if epochs is None else Recipe(epochs=epochs)
    runs = {
        variant: [run_variant(variant, digits, recipe, seed) for seed in range(seeds)] for variant in VARIANTS
    }
    summaries = summarise(runs, digits.test.images, out, LATENCY_ROUNDS)
    _draw(summaries, runs, out)
    seconds = time.perf_counter() - start
    _write_json(summaries, runs, recipe, seconds, out / "results.json")
    print("\n== Results ==")
    print(table(summaries))
    print(f"\n{seconds:.0f} s. Models (.pt2), results.json and plots (.png) are in {out}/")


def _show_rewrite(digits: Digits) -> None:
    """Print the graph without and with masks, and which channels hang together."""
    images = digits.train.images[:4]
    weights = pdp_fx.prepare(DigitNet(), PruneSpec(Unstructured(0.9)), images)
    channels = pdp_fx.prepare(DigitNet(), PruneSpec(Channels(mac_reduction=0.5)), images)
    print("== The net as a graph ==")
    pdp_fx.print_graph(DigitNet())
    print("\n== The same, prepared for unstructured pruning: every masked weight has a node ==")
    pdp_fx.print_graph(weights)
    print("\n== Channel groups: what is kept or removed together, and what stays and why ==")
    print(pdp_fx.explain(channels))


def _draw(summaries: Sequence[Summary], runs: Mapping[Variant, Sequence[Run]], out: Path) -> None:
    pruned = {variant.name: results[0].pruning for variant, results in runs.items()}
    prunings = {name: pruning for name, pruning in pruned.items() if pruning is not None}
    plot_accuracy(out / "accuracy.png", {row.variant: row.accuracy for row in summaries})
    plot_sparsity(
        out / "sparsity.png", {row.variant: row.layers for row in summaries if row.variant in prunings}
    )
    plot_weights(
        out / "weights.png",
        {name: pruning.before for name, pruning in prunings.items()},
        {name: pruning.after for name, pruning in prunings.items()},
    )
    plot_flips(
        out / "flips.png",
        {name: pruning.newly_pruned for name, pruning in prunings.items()},
        {name: pruning.restored for name, pruning in prunings.items()},
    )


def _write_json(
    summaries: Sequence[Summary],
    runs: Mapping[Variant, Sequence[Run]],
    recipe: Recipe,
    seconds: float,
    path: Path,
) -> None:
    content = {
        "recipe": asdict(recipe),
        "seconds": seconds,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "variants": [
            asdict(row)
            | {"training_seconds": [run.seconds for run in results]}
            | {"newly_pruned": [run.pruning.newly_pruned for run in results if run.pruning]}
            | {"restored": [run.pruning.restored for run in results if run.pruning]}
            for row, results in zip(summaries, runs.values(), strict=True)
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
