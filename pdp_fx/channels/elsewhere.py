"""Following the channels of a graph at other sizes than those of the example, too.

Sizes of the example may be equal by chance, such as those of 32 images of 32 x 32 pixels. A view that spreads
channels over images or pixels can then look like one that does not, and channels that it mixes seem to be
independent. What is tied or must stay at sizes that are all different holds for the example as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.grouping import concatenated
from pdp_fx.channels.record import Record
from pdp_fx.channels.rewrites import is_view
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
    if not _lays_out_by_sizes(gm, record):
        return
    for other in ExampleCall(*inputs).apart():
        try:
            found = follow((other.args, dict(other.kwargs)))
        except Exception as err:  # noqa: BLE001 the example is ours, not the user's
            _log.info("channels are not followed on another example, which the model refuses: %s", err)
            continue
        _heed(record, found)
        return


def _lays_out_by_sizes(gm: fx.GraphModule, record: Record) -> bool:
    """Whether a view of channels is given sizes that may be others at the next call."""
    given = record.varying | record.free_axes.keys()
    return any(
        any(value.layers for value in record.values_of(node.args[0]))
        and any(source.name in given for source in node.all_input_nodes if source is not node.args[0])
        for node in gm.graph.nodes
        if node.args and is_view(gm, node)
    )


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
