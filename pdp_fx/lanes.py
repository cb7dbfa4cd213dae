"""The layout of a channel picture, which `drawing` draws: a row for each layer, a lane for each group.

Rows follow the model from top to bottom. A group is a bar from the first layer that carries its channels to
the last; two bars can share a lane if they share no row. A weight that reads one group and produces another
is a link across lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdp_fx.channel_graph import AXIS, GROUP, Graph

HEAD = 2
"""Free rows above a bar's first layer, for its name and width."""


@dataclass(frozen=True)
class Bar:
    """A channel group: its lane, and its rows, the two free ones for its name included."""

    group: str
    kind: str
    width: int
    lane: int
    first: int
    last: int


@dataclass(frozen=True)
class Chip:
    """A parameter axis inside the bar of a group."""

    kind: str
    row: int
    lane: int
    group: str


@dataclass(frozen=True)
class Link:
    """A weight that reads the groups of some lanes and makes those of others."""

    row: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Picture:
    """All parts of a channel picture.

    Attributes:
        labels: the module of each row that has one.
        bars: one a group, in graph order.
        chips: one for each axis, kind and group, without duplicates.
        links: one for each weight that leads from group to group.
        rows: number of rows.
        lanes: number of lanes.
    """

    labels: dict[int, str]
    bars: tuple[Bar, ...]
    chips: tuple[Chip, ...]
    links: tuple[Link, ...]
    rows: int
    lanes: int


def lay_out(graph: Graph) -> Picture:
    """Lay out the graph that `pdp_fx.channel_graph` gives."""
    axes = [axis for axis, node in graph.nodes(data=True) if node["bipartite"] == AXIS]
    rows = _rows(graph, axes)
    bars = _bars(graph, rows)
    lane = {bar.group: bar.lane for bar in bars}
    chips = [
        Chip(graph.nodes[axis]["kind"], rows[graph.nodes[axis]["module"]], lane[group], group)
        for axis in axes
        for group in graph[axis]
    ]
    return Picture(
        labels={row: module for module, row in rows.items()},
        bars=tuple(bars),
        chips=tuple(dict.fromkeys(chips)),
        links=_links(graph, axes, rows, lane),
        rows=max(rows.values(), default=0) + 1,
        lanes=max(lane.values(), default=0) + 1,
    )


def _rows(graph: Graph, axes: list[str]) -> dict[str, int]:
    """The row of each module, with free rows where a group begins."""
    rows: dict[str, int] = {}
    begun: set[str] = set()
    row = 0
    for axis in axes:
        module = graph.nodes[axis]["module"]
        if module in rows:
            continue
        here = {g for other in axes if graph.nodes[other]["module"] == module for g in graph[other]}
        row += 0 if here <= begun else HEAD
        begun |= here
        rows[module] = row
        row += 1
    return rows


def _bars(graph: Graph, rows: dict[str, int]) -> list[Bar]:
    """Place the groups in lanes, the longest first, each as far to the left as it fits."""
    groups = [group for group, node in graph.nodes(data=True) if node["bipartite"] == GROUP]
    places = {group: [rows[graph.nodes[axis]["module"]] for axis in graph[group]] for group in groups}
    spans = {group: (min(found) - HEAD, max(found)) for group, found in places.items()}
    lanes: list[list[tuple[int, int]]] = []
    lane_of: dict[str, int] = {}
    for group in sorted(groups, key=lambda name: spans[name][0] - spans[name][1]):
        first, last = spans[group]
        free = (index for index, taken in enumerate(lanes) if all(last < f or first > t for f, t in taken))
        lane_of[group] = next(free, len(lanes))
        if lane_of[group] == len(lanes):
            lanes.append([])
        lanes[lane_of[group]].append(spans[group])
    kinds = {group: (graph.nodes[group]["kind"], graph.nodes[group]["width"]) for group in groups}
    return [Bar(group, *kinds[group], lane_of[group], *spans[group]) for group in groups]


def _links(graph: Graph, axes: list[str], rows: dict[str, int], lane: dict[str, int]) -> tuple[Link, ...]:
    ends: dict[str, tuple[list[int], list[int]]] = {}
    for axis in axes:
        node = graph.nodes[axis]
        found = ends.setdefault(node["tensor"], ([], []))
        if node["kind"] in ("reader", "producer"):
            found[node["kind"] == "producer"].extend(lane[group] for group in graph[axis])
    modules = {graph.nodes[axis]["tensor"]: graph.nodes[axis]["module"] for axis in axes}
    return tuple(
        Link(rows[modules[tensor]], tuple(sources), tuple(targets))
        for tensor, (sources, targets) in ends.items()
        if sources and targets
    )
