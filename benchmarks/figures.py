"""Figures of the trainings on CIFAR-10, drawn from their results; nothing is trained.

A figure takes the records that have what it shows, and is left out where there are none. Lines and bars are
means over seeds; bands and whiskers reach from the lowest seed to the highest.

    python -m benchmarks.figures --short
    python -m benchmarks.figures --sparsity 0.95 --methods dense pdp str st3 --figures flips layers
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from benchmarks import results
from benchmarks.ablations import ABLATIONS
from benchmarks.cifar_table import BATCH, RATE, by_method
from benchmarks.methods import FULL, SHORT
from benchmarks.results import Record
from benchmarks.table_runs import epochs_of
from pdp_fx.demo.plots import COLOURS, DOTS_PER_INCH, new_figure, plot_sparsity

PAPER_TAU = 1e-4

Point = tuple[str, str, object]


class Mark(NamedTuple):
    """How a point is drawn: its marker, whether it is filled, and the character that shows it in a text."""

    marker: str
    fill: Literal["full", "none"]
    shown: str


@dataclass(frozen=True)
class Chosen:
    """The records of one recipe.

    Attributes:
        groups: of the methods to compare, at one sparsity: the records of all seeds.
        weights: all of `cifar.py`.
        channels: all of `cifar_channels.py`.
        ablations: those of `ablations.py` at that sparsity.
    """

    groups: Mapping[str, Sequence[Record]]
    weights: Sequence[Record]
    channels: Sequence[Record]
    ablations: Sequence[Record]


def draw_flips(chosen: Chosen, path: Path) -> bool:
    """How many mask decisions differ from an epoch before (the paper's figure of PDP and STR)."""
    figure, axes = new_figure("Mask decisions that differ from an epoch before")
    drawn = _curves(axes, chosen, "flips", 100)
    axes.set_ylabel("decisions flipped, %")
    return _saved(figure, path, drawn)


def draw_progress(chosen: Chosen, path: Path) -> bool:
    """The loss of the training and the share that is pruned."""
    figure = Figure(figsize=(10, 4), dpi=DOTS_PER_INCH, layout="constrained")
    left, right = figure.subplots(1, 2)
    drawn = _curves(left, chosen, "losses")
    _curves(right, chosen, "pruned", 100)
    left.set_ylabel("mean training loss of the epoch")
    left.set_yscale("log")
    right.set_ylabel("pruned by the hard masks, %")
    return _saved(figure, path, drawn)


def draw_layers(chosen: Chosen, path: Path) -> bool:
    """The sparsity of each layer."""
    shares = {
        name: {
            layer: statistics.fmean(1 - r["layers"][layer][0] / r["layers"][layer][1] for r in records)
            for layer in records[0]["layers"]
        }
        for name, records in chosen.groups.items()
        if name != "dense"
    }
    if shares:
        plot_sparsity(path, shares)
    return bool(shares)


def draw_weights(chosen: Chosen, path: Path) -> bool:
    """Histograms of the weights at a few epochs, of the first seed of each method."""
    found = {name: next((r for r in rows if r.get("weights")), None) for name, rows in chosen.groups.items()}
    shown = {name: record["weights"] for name, record in found.items() if record is not None}
    if not shown:
        return False
    columns = max(len(moments) for moments in shown.values())
    figure = Figure(figsize=(3 * columns, 2.3 * len(shown)), dpi=100, layout="constrained")
    panels = figure.subplots(len(shown), columns, squeeze=False)
    for row, (name, moments) in zip(panels, shown.items(), strict=True):
        for axes, moment in zip(row, moments, strict=False):
            edges = np.linspace(-moment["reach"], moment["reach"], len(moment["counts"]) + 1)
            axes.stairs(moment["counts"], edges, fill=True, color="#c4c4c4")
            axes.stairs(moment["left"], edges, fill=True, color=_colours(chosen)[name], alpha=0.8)
            share = 100 * sum(moment["left"]) / max(sum(moment["counts"]), 1)
            axes.set_title(f"{name}, epoch {moment['epoch']}: {share:.1f} % left", fontsize=8)
            axes.set_yscale("log")
            axes.tick_params(labelsize=7)
    figure.suptitle("Weights as they are stored: all, and in colour those that the hard masks leave")
    return _saved(figure, path, True, legend=False)


def draw_macs(chosen: Chosen, path: Path) -> bool:
    """Accuracy against multiply-accumulates, of all methods, allocations and sparsities."""
    points = _points(chosen)
    if not points:
        return False
    figure, axes = new_figure("Accuracy against multiply-accumulates", width=8.5, height=5)
    names = list(dict.fromkeys(r["method"] for r in [*chosen.weights, *chosen.channels]))
    palette = [colormaps[each](place) for each in ("tab20", "tab20b") for place in range(20)]
    colours = dict(zip(names, palette, strict=False))
    marks = _marks(points)
    labelled: set[str] = set()
    for (block, name, _), records in points.items():
        accuracies = [100 * record["hard"] for record in records]
        middle = statistics.fmean(accuracies)
        axes.errorbar(
            statistics.fmean(record["macs"] for record in records) / 1e6,
            middle,
            [[middle - min(accuracies)], [max(accuracies) - middle]],
            color=colours[name],
            marker=marks[block].marker,
            fillstyle=marks[block].fill,
            label="" if name in labelled else name,
        )
        labelled.add(name)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    shown = "   ".join(f"{mark.shown} {block}" for block, mark in marks.items())
    axes.set_xlabel(f"million multiply-accumulates   {shown}")
    axes.set_ylabel("accuracy with hard masks, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return _saved(figure, path, True, legend=False)


def _marks(points: Iterable[Point]) -> dict[str, Mark]:
    """The mark of each block that has points: round, square, and a triangle of its own for each pattern."""
    marks = {
        "own": Mark("o", "full", "●"),
        "common": Mark("o", "none", "○"),
        "channels": Mark("s", "full", "■"),
    }
    patterns = sorted({block for block, _, _ in points if ":" in block})
    ways = zip(patterns, itertools.cycle(("^▲", "v▼", "<◀", ">▶")), strict=False)
    return marks | {pattern: Mark(marker, "full", shown) for pattern, (marker, shown) in ways}


def draw_tau(chosen: Chosen, path: Path) -> bool:
    """Accuracy against tau, absolute and relative."""
    figure = Figure(figsize=(10, 4), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    swept = [(r, ABLATIONS[r["name"]]) for r in chosen.ablations]
    swept = [(r, setting) for r, setting in swept if setting.policy is None and not setting.channels]
    drawn = False
    for axes, relative in zip(panels, (False, True), strict=True):
        found: dict[float, list[float]] = {}
        for record, setting in swept:
            tau = str(setting.options.get("tau", PAPER_TAU))
            if tau.startswith("rel:") == relative:
                found.setdefault(float(tau.removeprefix("rel:")), []).append(100 * record["hard"])
        places = sorted(found)
        if places:
            axes.plot(places, [statistics.fmean(found[tau]) for tau in places], "-o", color=COLOURS[1])
            spans = [[min(found[tau]) for tau in places], [max(found[tau]) for tau in places]]
            axes.fill_between(places, *spans, color=COLOURS[1], alpha=0.2)
            drawn = True
        axes.set_xscale("log")
        axes.set_xlabel("tau, as a part of the layer's mean square" if relative else "tau")
    panels[0].set_ylabel("accuracy with hard masks, %")
    return _saved(figure, path, drawn, legend=False)


FIGURES: dict[str, Callable[[Chosen, Path], bool]] = {
    "flips": draw_flips,
    "progress": draw_progress,
    "layers": draw_layers,
    "weights": draw_weights,
    "macs": draw_macs,
    "tau": draw_tau,
}
"""What draws a figure into a file and says whether there was anything to draw."""


def _colours(chosen: Chosen) -> dict[str, str]:
    """The colour of each method, the same in all figures."""
    others = [name for name in chosen.groups if name != "dense"]
    return {"dense": COLOURS[0]} | {
        name: COLOURS[(place + 1) % len(COLOURS)] for place, name in enumerate(others)
    }


def _curves(axes: Axes, chosen: Chosen, field: str, factor: float = 1.0) -> bool:
    """One line for each method over its epochs, with a band over the seeds."""
    for name, records in chosen.groups.items():
        rows = [record[field] for record in records if record.get(field)]
        if rows:
            colour = _colours(chosen)[name]
            values = factor * np.array(rows)
            epochs = np.arange(1, values.shape[1] + 1)
            axes.plot(epochs, values.mean(0), color=colour, label=name)
            axes.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2)
    axes.set_xlabel("epoch")
    return bool(axes.lines)


def _points(chosen: Chosen) -> dict[Point, list[Record]]:
    """The records of each point of a scatter, all seeds of one setting: by block, method and amount."""
    found: dict[Point, list[Record]] = {}
    for record in chosen.weights:
        point = record["block"], record["method"], (record["ratio"], record["knob"])
        found.setdefault(point, []).append(record)
    for record in chosen.channels:
        found.setdefault(("channels", record["method"], record["reduction"]), []).append(record)
    return found


def _saved(figure: Figure, path: Path, drawn: bool, legend: bool = True) -> bool:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if legend and axes.lines:
            axes.legend(fontsize=8, frameon=False)
    if drawn:
        figure.savefig(path)
    return drawn


def chosen_of(options: argparse.Namespace) -> Chosen:
    """The records that the options ask for, of the common learning rate and batch size."""
    weights, channels, ablations = (
        [
            record
            for record in results.load(options.results / f"{name}.jsonl").values()
            if (record["epochs"], record["validated"]) == (epochs_of(options), options.validate)
            and (record["rate"], record["batch"]) == (RATE, BATCH)
        ]
        for name in ("cifar", "cifar_channels", "ablations")
    )
    found = {rows[0]["method"]: rows for rows in by_method(weights, options.sparsity, options.block)}
    groups = {name: found[name] for name in options.methods if name in found}
    return Chosen(groups, weights, channels, [r for r in ablations if r["amount"] == options.sparsity])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Figures of the trainings on CIFAR-10.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of .jsonl")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/figures"))
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--methods", nargs="+", default=["dense", "pdp", "str"], help="of flips to weights")
    parser.add_argument("--sparsity", type=float, default=0.863)
    parser.add_argument("--block", default="own", help='"own", "common" or an N:M pattern')
    parser.add_argument("--short", action="store_true", help=f"of {SHORT} epochs instead of --epochs")
    parser.add_argument("--epochs", type=int, default=FULL)
    parser.add_argument("--validate", action="store_true", help="of trainings with held out images")
    options = parser.parse_args(arguments)
    chosen = chosen_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.figures:
        path = options.out / f"{name}.png"
        print(path if FIGURES[name](chosen, path) else f"{name}: no record has what it shows")


if __name__ == "__main__":
    main()
