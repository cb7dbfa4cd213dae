"""The four pictures of the demonstration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

DOTS_PER_INCH = 150
COLOURS = ("#4c4c4c", "#3b6fb6", "#d1812b", "#3f8f5b", "#8a5aa8", "#b8433f")


def plot_accuracy(path: Path, accuracies: Mapping[str, Sequence[float]]) -> None:
    """Draw one dot a seed and a bar at the mean; `accuracies` holds shares in [0, 1] by variant."""
    figure, axes = new_figure("Test accuracy of the converted models", width=1.2 * len(accuracies) + 2)
    for place, (colour, values) in enumerate(zip(COLOURS, accuracies.values(), strict=False)):
        percent = 100 * np.asarray(values)
        axes.hlines(percent.mean(), place - 0.25, place + 0.25, color=colour, linewidth=2)
        axes.plot([place] * len(percent), percent, "o", color=colour, alpha=0.6)
    axes.set_xticks(range(len(accuracies)), list(accuracies))
    axes.set_xlim(-0.6, len(accuracies) - 0.4)
    axes.set_ylabel("test accuracy, % (a dot a seed)")
    figure.savefig(path)


def plot_sparsity(path: Path, sparsities: Mapping[str, Mapping[str, float]]) -> None:
    """Draw bars: the share of each layer's weights that is gone, in [0, 1], by variant and layer."""
    layers = list(dict.fromkeys(layer for rows in sparsities.values() for layer in rows))
    height = 0.8 / len(sparsities)
    figure, axes = new_figure("Share of each layer's weights that is gone", height=0.35 * len(layers) + 1.5)
    for index, (variant, rows) in enumerate(sparsities.items()):
        places = np.arange(len(layers)) + (index - (len(sparsities) - 1) / 2) * height
        shares = [100 * rows.get(layer, 0.0) for layer in layers]
        axes.barh(places, shares, height, color=COLOURS[(index + 1) % len(COLOURS)], label=variant)
    axes.set_yticks(range(len(layers)), layers)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("zero or removed, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    figure.savefig(path)


def plot_weights(path: Path, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Draw histograms by variant: all weights as trained, and those that are left (of channels, the RMS)."""
    figure = Figure(figsize=(4.2 * len(before), 3.6), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle("Before and after the masks are applied")
    panels = figure.subplots(1, len(before), squeeze=False)[0]
    for index, (axes, variant) in enumerate(zip(panels, before, strict=True)):
        low, high = min(before[variant].min().item(), 0), before[variant].max().item()
        bins = np.linspace(low, high, 61)
        axes.hist(before[variant].numpy(), bins, color="#c4c4c4", label="before: as trained")
        axes.hist(
            after[variant].numpy(), bins, color=COLOURS[index + 1], alpha=0.8, label="after: what is left"
        )
        axes.set_title(f"{variant}: {len(after[variant]):,} of {len(before[variant]):,} left", fontsize=9)
        axes.set_yscale("log")
        axes.set_xlabel("weight" if low < 0 else "root mean square of a channel's weights")
        axes.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("how many (log scale)")
    figure.savefig(path)


def plot_flips(
    path: Path, pruned: Mapping[str, Sequence[float]], restored: Mapping[str, Sequence[float]]
) -> None:
    """Draw the share of mask decisions that differ from an epoch before, by variant, split by direction."""
    figure, axes = new_figure("Mask decisions flipped since the epoch before")
    for colour, variant in zip(COLOURS[1:], pruned, strict=False):
        epochs = range(1, len(pruned[variant]) + 1)
        axes.plot(epochs, 100 * np.asarray(pruned[variant]), color=colour, label=f"{variant}: newly pruned")
        axes.plot(
            epochs, 100 * np.asarray(restored[variant]), "--", color=colour, label=f"{variant}: back again"
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("decisions flipped, %")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def new_figure(title: str, width: float = 7.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure with its size in inches."""
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
