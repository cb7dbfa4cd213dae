"""Drawing a model's channel groups: what is removed together, which layers carry it, and what stays.

A row is a layer, a bar is a channel group, and an arrow is a weight that reads one group and produces another
(`lanes` computes the layout). matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from pdp_fx.alike import few
from pdp_fx.channel_graph import Graph, channel_graph
from pdp_fx.errors import SpecError
from pdp_fx.field_checks import described
from pdp_fx.lanes import Bar, Chip, Link, Picture, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.2
LANE = 1.5
"""Inches from row to row and from lane to lane."""

TALLEST = 80.0
"""Inches; a taller picture is drawn at a smaller scale."""

FILLS = ("#dbe7f6", "#fbe3cf", "#dcefe1", "#e9dff2", "#f6dcdc", "#fbf0c9", "#d7eef0", "#efe3d8")
INKS = ("#2f5f9e", "#b4641a", "#2f7d4b", "#6f4694", "#a53a3a", "#8f7412", "#1f7a80", "#7a5230")
FROZEN_FILL, FROZEN_INK = "#e6e6e6", "#6b6b6b"
GREY = "#4a4a4a"

MARKERS = {"producer": ("s", 5.5), "norm": ("D", 4.5), "reader": ("o", 5.5), "carrier": ("o", 2.5)}
"""The shape of each kind of axis, and its size in points."""

SIDES = {"reader": -0.28, "carrier": 0.0, "norm": 0.0, "producer": 0.28}
"""Where the chips of each kind lie inside a bar, in lanes from its middle."""

LEGEND = {
    "producer": "weight that makes the channels",
    "reader": "weight that reads them",
    "norm": "norm",
    "carrier": "bias or other parameter",
}
NOTES = 12
"""The most groups whose reasons are written under the picture."""


def draw_channels(model: nn.Module, path: str | Path) -> None:
    """Draw the channel groups of a prepared model.

    Args:
        model: a model prepared with example inputs.
        path: the file to write, by its ending: .svg, .png, or what else matplotlib writes.

    Raises:
        StateError: the model was never prepared, or without example inputs.
        SpecError: matplotlib writes no file of this ending.
        ImportError: matplotlib is missing.
    """
    graph = channel_graph(model)
    matplotlib = _imported("matplotlib")
    # Text stays text, and the same model gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pdp_fx"}):
        figure = _drawn(graph, lay_out(graph))
        _refuse_ending(path, figure.canvas.get_supported_filetypes())
        metadata: dict[str, Any] = {"Date": None} if Path(path).suffix == ".svg" else {}
        figure.savefig(path, bbox_inches="tight", metadata=metadata)


def _refuse_ending(path: object, known: Iterable[str]) -> None:
    """Refuse a path whose ending says nothing; matplotlib would add one of its own."""
    if not isinstance(path, str | PathLike):
        raise SpecError(f"draw_channels needs the path of a file to write, got {described(path)}")
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise SpecError(
            f"draw_channels cannot write {str(path)!r}: its ending must be .svg, .png or another of "
            f"{', '.join(sorted(known))}"
        )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise ImportError("drawing needs matplotlib; write: pip install 'pdp-fx[demo]'") from err


def _drawn(graph: Graph, picture: Picture) -> Figure:
    scale = min(1.0, TALLEST / (ROW * (picture.rows + 6)))
    margin = 0.045 * max(map(len, picture.labels.values()), default=0) + 0.2
    size = (scale * LANE * (picture.lanes + margin), scale * ROW * (picture.rows + 6))
    figure: Figure = _imported("matplotlib.figure").Figure(figsize=size, dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-margin, picture.lanes)
    axes.set_ylim(picture.rows + 1, -5)
    axes.set_axis_off()
    colours = {bar.group: _colours(bar, index) for index, bar in enumerate(picture.bars)}
    _draw_rows(axes, picture, scale)
    for bar in picture.bars:
        _draw_bar(axes, bar, *colours[bar.group], scale)
    _draw_links(axes, picture.links, scale)
    for (kind, ink), chips in _by_look(picture, colours).items():
        xs = [chip.lane + 0.5 + SIDES[kind] for chip in chips]
        _draw_markers(axes, xs, [chip.row for chip in chips], kind, ink, scale)
    _draw_words(axes, graph, picture, margin, scale)
    return figure


def _by_look(picture: Picture, colours: dict[str, tuple[str, str]]) -> dict[tuple[str, str], list[Chip]]:
    looks: dict[tuple[str, str], list[Chip]] = {}
    for chip in picture.chips:
        looks.setdefault((chip.kind, colours[chip.group][1]), []).append(chip)
    return looks


def _draw_rows(axes: Axes, picture: Picture, scale: float) -> None:
    """The names of the layers, and a hairline from each to the bars."""
    rows = list(picture.labels)
    axes.hlines(rows, -0.05, picture.lanes - 0.1, color="#ececec", linewidth=0.6 * scale, zorder=0)
    for row, module in picture.labels.items():
        axes.text(-0.1, row, module, ha="right", va="center", fontsize=7 * scale, color=GREY)


def _colours(bar: Bar, index: int) -> tuple[str, str]:
    if bar.kind == "frozen":
        return FROZEN_FILL, FROZEN_INK
    return FILLS[index % len(FILLS)], INKS[index % len(INKS)]


def _draw_bar(axes: Axes, bar: Bar, fill: str, ink: str, scale: float) -> None:
    patches = _imported("matplotlib.patches")
    corner, height = (bar.lane + 0.06, bar.first - 0.35), bar.last - bar.first + 0.8
    style = "round,pad=0,rounding_size=0.1"
    box = patches.FancyBboxPatch(corner, 0.88, height, boxstyle=style, mutation_aspect=LANE / ROW)
    box.set(facecolor=fill, edgecolor=ink, linewidth=0.9 * scale, zorder=1)
    if bar.kind == "frozen":
        box.set(linestyle="--")
    axes.add_patch(box)
    stays = " stay" if bar.kind == "frozen" else ""
    unit = "channel" if bar.width == 1 else "channels"
    place: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "zorder": 5}
    axes.text(bar.lane + 0.5, bar.first + 0.15, _short(bar.group), **place, fontsize=7 * scale, weight="bold")
    axes.text(bar.lane + 0.5, bar.first + 1.05, f"{bar.width} {unit}{stays}", **place, fontsize=6.5 * scale)


_LONGEST_NAME = 19


def _short(name: str) -> str:
    """As many of the last parts of a long name as fit; they say more than the first ones."""
    if len(name) <= _LONGEST_NAME:
        return name
    parts = name.split(".")
    fitting = (".".join(parts[start:]) for start in range(1, len(parts)))
    last = next((text for text in fitting if len(text) < _LONGEST_NAME), name[1 - _LONGEST_NAME :])
    return f"\N{HORIZONTAL ELLIPSIS}{last}"


def _draw_links(axes: Axes, links: tuple[Link, ...], scale: float) -> None:
    """A line from the outermost lanes that a weight reads to every lane that it makes."""
    for link in links:
        starts = [lane + 0.5 + SIDES["reader"] for lane in (min(link.sources), max(link.sources))]
        ends = [lane + 0.5 + SIDES["producer"] for lane in dict.fromkeys(link.targets)]
        reach = [*starts, *ends]
        axes.hlines(link.row, min(reach), max(reach), color=GREY, linewidth=0.8 * scale, zorder=3)
        for end in ends:
            if min(starts) < end:
                axes.plot(end - 0.07, link.row, ">", color=GREY, markersize=3.5 * scale, zorder=3)
            if max(starts) > end:
                axes.plot(end + 0.07, link.row, "<", color=GREY, markersize=3.5 * scale, zorder=3)


def _draw_markers(
    axes: Axes, xs: list[float], ys: Sequence[float], kind: str, ink: str, scale: float
) -> None:
    marker, size = MARKERS[kind]
    face = "white" if kind == "reader" else ink
    style: dict[str, Any] = {"marker": marker, "markersize": size * scale, "markeredgewidth": 0.9 * scale}
    axes.plot(xs, ys, linestyle="", markerfacecolor=face, markeredgecolor=ink, zorder=4, **style)


def _draw_words(axes: Axes, graph: Graph, picture: Picture, margin: float, scale: float) -> None:
    """The title and the legend above the picture, and the reasons of what stays below it."""
    name = graph.graph.get("name") or "the model"
    axes.text(-margin, -4.1, f"Channel groups of {name}", fontsize=11 * scale, weight="bold", color="#222222")
    for index, (kind, words) in enumerate(LEGEND.items()):
        x, y = -margin + 0.05 + 1.8 * (index // 2), -3.3 + 0.9 * (index % 2)
        _draw_markers(axes, [x], [y], kind, GREY, scale)
        axes.text(x + 0.1, y, words, va="center", fontsize=7 * scale, color=GREY)
    notes = [(bar.group, graph.nodes[bar.group]["reasons"]) for bar in picture.bars if bar.kind == "frozen"]
    lines = [f"{group} stays. {few(reasons.splitlines(), 1)}" for group, reasons in notes[:NOTES]]
    if len(notes) > NOTES:
        lines.append(f"and {len(notes) - NOTES} more groups that stay; pdp_fx.explain lists them all")
    width = max(int(21 * (picture.lanes + margin)), 60)
    text = "\n".join(
        piece for line in lines for piece in textwrap.wrap(line, width, subsequent_indent="    ")
    )
    axes.text(-margin, picture.rows + 0.6, text, va="top", fontsize=7 * scale, color=GREY)
