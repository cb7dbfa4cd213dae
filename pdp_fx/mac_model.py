"""Building the `MacModel`: multiply-accumulates as a function of how many channels each group keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdp_fx.allocation import MacModel, MacTerm
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.record import Use


def mac_model(found: ChannelMap, groups: Sequence[ChannelGroup]) -> MacModel:
    """Build the model from the channel structure; weights only, as the paper counts.

    Args:
        found: the channel structure.
        groups: the groups that will be pruned, in the order in which counts are given.
    """
    group_of = np.full(len(found.classes), -1)
    for index, group in enumerate(groups):
        group_of[group.classes] = index
    widths = tuple(group.width for group in groups)
    terms = tuple(_term(found, use, group_of, widths) for use in found.uses)
    return MacModel(terms, widths)


def _term(found: ChannelMap, use: Use, group_of: np.ndarray, widths: tuple[int, ...]) -> MacTerm:
    """The multiply-accumulates of one use of a weight; ``group_of`` is the group of every class, or -1."""
    factor = use.positions / found.batch
    axes: list[tuple[int, tuple[tuple[int, float], ...]]] = []
    for axis in use.axes:
        owners = np.full(axis, -1) if isinstance(axis, int) else group_of[axis]
        carried = [int(index) for index in np.unique(owners) if index >= 0]
        parts = tuple((index, float((owners == index).sum()) / widths[index]) for index in carried)
        if parts:
            axes.append((int((owners < 0).sum()), parts))
        else:
            factor *= len(owners)
    return MacTerm(factor, tuple(axes))
