"""Following the channels of a graph at other sizes than those of the example, too.

Sizes of the example may be equal by chance, such as those of 32 images of 32 x 32 pixels. A view that spreads
channels over images or pixels can then look like one that does not, and channels that it mixes seem to be
independent; so can one of a single example that is right for single examples only. What is tied or must stay
at sizes that are all different holds for the example as well.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn import functional

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.counts import JOINS, is_fixed
from pdp_fx.channels.grouping import concatenated
from pdp_fx.channels.labels import Reason, is_between_others
from pdp_fx.channels.record import Labelled, Record
from pdp_fx.channels.rewrites import chooses, sizes_laid_out
from pdp_fx.tracing.examples import ExampleCall, Inputs, first_taken

ELSEWHERE = "on inputs of other sizes"
"""What is added to the reasons why channels stay that do not hold for the example itself."""

RESAMPLES: frozenset[Any] = frozenset({
    functional.interpolate, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d,
    functional.adaptive_avg_pool3d, functional.adaptive_max_pool1d, functional.adaptive_max_pool2d,
    functional.adaptive_max_pool3d,
})  # fmt: skip
"""Functions that sweep the same axes for any number of pixels that they make; channels along these stay."""


def heed_other_sizes(
    record: Record,
    gm: fx.GraphModule,
    inputs: Inputs,
    follow: Callable[[Inputs], ChannelMap],
    takes: Callable[[ExampleCall], object],
) -> None:
    """Add what is tied and what stays at other sizes, if the graph lays channels out by sizes.

    Args:
        record: what a run on the example has shown; it is changed.
        gm: the graph module that ran.
        inputs: the example.
        follow: gives the channel structure for other inputs, or raises an error if the model refuses them.
        takes: raises an error if the model refuses other inputs.
    """
    merged = _merged(gm, record)
    views = list(_views_of_channels(gm, record, merged))
    single = _chooses_by_counts(gm, record) or not all(view.keeps_examples_apart for view in views)
    varies = any(view.varies for view in views) or _follows_sizes(gm, record)
    if not single and not varies and not any(chooses(gm, node) for node in merged):
        return
    record.by_sizes = True
    example, widths = ExampleCall(*inputs), widths_of(record.shapes)
    free = example.sizes_taken(takes)
    larger = any(view.varies and view.of_one_index for view in views)
    for others in (example.unlike(free, widths), example.apart(free, single, larger)):
        found = first_taken(others, lambda call: follow((call.args, dict(call.kwargs))), takes)
        if found is not None:
            _heed(record, found[1], gm)


def widths_of(shapes: Mapping[str, tuple[int, ...]]) -> set[int]:
    """The sizes of all axes of parameters and buffers."""
    return {size for shape in shapes.values() for size in shape}


def _follows_sizes(gm: fx.GraphModule, record: Record) -> bool:
    """Whether an operation on channels is told a number that may be another at the next call.

    A number that does nothing on the example, such as 0 to add, may do something elsewhere. How many pixels
    are made of others is no such number.
    """
    nodes = (node for node in gm.graph.nodes if _reads_channels(node, record))
    return any(record.tells_varying(node) and node.target not in RESAMPLES for node in nodes)


def _reads_channels(node: fx.Node, record: Record) -> bool:
    values = (value for source in node.all_input_nodes for value in record.values_of(source))
    return any(value.layers for value in values)


def _merged(gm: fx.GraphModule, record: Record) -> list[fx.Node]:
    """The nodes that read channels behind an operation which has put axes together, as a flattening does.

    Where an image has one pixel, or a batch one example, positions along such an axis look like channels.
    """
    found = dict[fx.Node, None]()
    begun = set[fx.Node]()
    for node in gm.graph.nodes:
        if not _reads_channels(node, record):
            continue
        if any(source in begun for source in node.all_input_nodes):
            found[node] = None
            begun.add(node)
        elif _joins_axes(node, record):
            begun.add(node)
    return list(found)


def _joins_axes(node: fx.Node, record: Record) -> bool:
    """Whether a result has the elements of one tensor along fewer axes, be it by joining parts of it."""
    parts = {_whole(source) for source in node.all_input_nodes}
    given = [value for part in parts for value in record.values_of(part)[:1]]
    for value in record.values_of(node) if len(given) == 1 else ():
        if math.prod(value.shape) == math.prod(given[0].shape) and len(value.shape) < len(given[0].shape):
            return True
    return len(parts) == 1 and getattr(node.target, "__name__", "") in JOINS


def _chooses_by_counts(gm: fx.GraphModule, record: Record) -> bool:
    """Whether channels are chosen by a number of channels, which may be that of a whole batch."""
    resized = frozenset(record.resized)
    told = (
        node
        for node in gm.graph.nodes
        if node.name in resized and any(given.name in record.taint for given in node.all_input_nodes)
    )
    return any(chooses(gm, node) for node in told)


def _whole(part: fx.Node) -> fx.Node:
    """The node that a node is a part of the result of, or that node itself."""
    return part.all_input_nodes[0] if part.target is operator.getitem else part


@dataclass(frozen=True)
class _View:
    """A view of channels that need not be the same at other sizes.

    Attributes:
        varies: whether it is given sizes that may be others at the next call.
        keeps_examples_apart: whether a view of a single example is one of each example of a batch, too.
        of_one_index: whether another axis than the first has one index, which may be left of many.
    """

    varies: bool
    keeps_examples_apart: bool
    of_one_index: bool


def _views_of_channels(gm: fx.GraphModule, record: Record, merged: Container[fx.Node]) -> Iterator[_View]:
    """The views of channels that are given a size of -1 or one that may be another at the next call."""
    given = record.varying | record.free_axes.keys()
    for node in gm.graph.nodes:
        values = record.values_of(node.args[0]) if node.args else ()
        if len(values) != 1 or not values[0].layers:
            continue
        found = sizes_laid_out(gm, node, len(values[0].shape))
        if found is None:
            continue
        first, sizes = found
        varies = any(isinstance(size, fx.Node) and size.name in given for size in sizes)
        varies = varies or (-1 in sizes and node in merged)
        if varies or -1 in sizes:
            single = all(value.shape[:1] == (1,) for value in (*values, *record.values_of(node)))
            # The first axis may be that of the rows of an image of one row, and the batch another.
            single = single and not (record.reorders and 1 in values[0].shape[1:])
            apart = single and (first > 0 or _starts_with_batch(sizes))
            yield _View(varies, apart, 1 in values[0].shape[1:])


def _starts_with_batch(sizes: list[Any]) -> bool:
    """Whether the first size is that of another first axis or what is left, and no other need follow it."""
    first, *rest = sizes
    batch = first == -1 or _axis_read(first) == 0
    return batch and all(isinstance(size, int) or _axis_read(size) for size in rest)


def _axis_read(size: Any) -> int | None:
    """The axis whose size is read here; None if a node computes a size, and for a number."""
    if not isinstance(size, fx.Node):
        return None
    axis: Any = size.args[1] if size.target == "size" and len(size.args) > 1 else None
    return axis if isinstance(axis, int) else None


def _heed(record: Record, other: ChannelMap, gm: fx.GraphModule) -> None:
    """Tie what is tied in ``other``, freeze what stays there, and mask what must be masked there."""
    slots = [slot for slot, ids in record.slots.items() if len(other.slots.get(slot, ())) == len(ids)]
    ids = concatenated(record.slots[slot].numpy() for slot in slots)
    classes = concatenated(other.slots[slot] for slot in slots)
    one_of = np.full(len(other.classes), -1)
    one_of[classes] = ids
    record.ties.bind(torch.from_numpy(ids), torch.from_numpy(one_of[classes]))
    for group in other.frozen:
        here = one_of[group.classes]
        for reason in group.reasons:
            elsewhere = replace(reason, why=f"{reason.why}, {ELSEWHERE}")
            record.elsewhere.append((here[here >= 0], elsewhere))
    record.masked |= other.masked
    for node in gm.graph.nodes:
        source = node.args[0] if chooses(gm, node) else None
        here, there = record.values_of(source), other.values.get(getattr(source, "name", ""))
        if here and there:
            _keep_merged(node, record, here[0], there[0])


def _keep_merged(node: fx.Node, record: Record, here: Labelled, there: Labelled) -> None:
    """Freeze channels that are chosen by positions along an axis which holds more than them elsewhere."""
    for layer in here.layers:
        for axis in layer.support:
            mixed = len(layer.support) == 1 and is_between_others(layer.ids.reshape(-1))
            if mixed or (is_fixed(here, axis) and not is_fixed(there, axis)):
                source = str(node.meta.get("source", ""))
                why = f"positions are told along an axis that holds more than these channels, {ELSEWHERE}"
                record.elsewhere.append((layer.ids.reshape(-1).numpy(), Reason(node.name, source, why)))
