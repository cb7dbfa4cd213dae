"""Building the `MacModel`: multiply-accumulates as a function of how many channels each group keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdp_fx.allocation import MacModel, MacTerm
from pdp_fx.channels.channel_map import ChannelGroup, ChannelMap
from pdp_fx.channels.labels import Slot
from pdp_fx.channels.record import Contraction


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
    terms = tuple(_term(found, contraction, group_of, widths) for contraction in found.contractions)
    return MacModel(terms, widths)


def _term(
    found: ChannelMap, contraction: Contraction, group_of: np.ndarray, widths: tuple[int, ...]
) -> MacTerm:
    """The multiply-accumulates of one contraction; ``group_of`` is the group of every class, or -1."""
    factor = contraction.positions / found.batch
    axes: list[tuple[int, tuple[tuple[int, float], ...]]] = []
    for axis, size in enumerate(found.shapes[contraction.weight]):
        owners = group_of[found.slots[Slot(contraction.weight, axis)]] if size > 1 else np.array([-1])
        carried = [int(index) for index in np.unique(owners) if index >= 0]
        parts = tuple((index, float((owners == index).sum()) / widths[index]) for index in carried)
        if parts:
            axes.append((int((owners < 0).sum()), parts))
        else:
            factor *= size
    return MacTerm(factor, tuple(axes))
