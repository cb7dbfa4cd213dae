"""Following the channels of a graph at other sizes than those of the example, too.

Sizes of the example may be equal by chance, such as those of 32 images of 32 x 32 pixels. A view that spreads
channels over images or pixels can then look like one that does not, and channels that it mixes seem to be
independent; so can one of a single example that is right for single examples only. What is tied or must stay
at sizes that are all different holds for the example as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.grouping import concatenated
from pdp_fx.channels.record import Record
from pdp_fx.channels.rewrites import chooses, sizes_laid_out
from pdp_fx.tracing.examples import ExampleCall, Inputs

_log = logging.getLogger(__name__)

ELSEWHERE = "on inputs of other sizes"
"""What is added to the reasons why channels stay that do not hold for the example itself."""


def heed_other_sizes(
    record: Record, gm: fx.GraphModule, inputs: Inputs, follow: Callable[[Inputs], ChannelMap]
) -> None:
    """Add what is tied and what stays at other sizes, if the graph lays channels out by sizes.

    Args:
        record: what a run on the example has shown; it is changed.
        gm: the graph module that ran.
        inputs: the example.
        follow: gives the channel structure for other inputs, or raises an error if the model refuses them.
    """
    views = list(_views_of_channels(gm, record))
    single = _chooses_by_counts(gm, record) or not all(view.keeps_examples_apart for view in views)
    if not single and not any(view.varies for view in views):
        return
    record.by_batch = single
    example, widths = ExampleCall(*inputs), {size for shape in record.shapes.values() for size in shape}
    larger = any(view.varies and view.of_one_index for view in views)
    for others in (example.unlike(widths), example.apart(single, larger)):
        found = next((each for each in map(partial(_tried, follow), others) if each is not None), None)
        if found is not None:
            _heed(record, found)


def _tried(follow: Callable[[Inputs], ChannelMap], other: ExampleCall) -> ChannelMap | None:
    try:
        return follow((other.args, dict(other.kwargs)))
    except Exception as err:  # noqa: BLE001 the example is ours, not the user's
        _log.info("channels are not followed on another example, which the model refuses: %s", err)
        return None


def _chooses_by_counts(gm: fx.GraphModule, record: Record) -> bool:
    """Whether channels are chosen by a number of channels, which may be that of a whole batch."""
    resized = frozenset(record.resized)
    told = (
        node
        for node in gm.graph.nodes
        if node.name in resized and any(given.name in record.taint for given in node.all_input_nodes)
    )
    return any(chooses(gm, node) for node in told)


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


def _views_of_channels(gm: fx.GraphModule, record: Record) -> Iterator[_View]:
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


def _heed(record: Record, other: ChannelMap) -> None:
    """Tie what is tied in ``other``, and freeze what stays there."""
    slots = [slot for slot in record.slots if slot in other.slots]
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
