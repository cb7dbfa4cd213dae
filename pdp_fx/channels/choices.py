"""Choosing between channels that lie along two axes where only those along one of them can be followed.

Heads and the channels inside them meet values that all heads share; the axes of speakers and of features are
merged. At first it is the outer channels that are followed, so that whole heads can go. If they turn out to
stay, the graph is followed anew, and there the inner ones can go, of all outer ones alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.channels.record import Record

ROUNDS = 4
"""How often choices are changed: what is followed anew may come to other choices."""


def choose(
    record: Record, solve: Callable[[Record], ChannelMap], follow: Callable[[frozenset[str]], Record]
) -> Record:
    """The record of a run with the choices by which more channels can go.

    Args:
        record: what a run has shown in which the outer channels were followed everywhere.
        solve: gives the channel structure of a record.
        follow: runs the graph again with labels; told the nodes at which inner channels are followed.
    """
    for _ in range(ROUNDS):
        if not record.choices:
            return record
        found = solve(record)
        useless = _useless(record, found)
        if not useless:
            return record
        other = follow(record.inner | useless)
        if _removable(solve(other)) <= _removable(found):
            return record
        record = other
    return record


def _useless(record: Record, found: ChannelMap) -> frozenset[str]:
    """The nodes at which outer channels are followed that all stay."""
    stays = np.zeros(len(found.classes), dtype=bool)
    stays[found.stays] = True
    free = {node for node, ids in record.choices if not stays[found.classes[ids]].all()}
    return frozenset(node for node, _ in record.choices) - free - record.inner


def _removable(found: ChannelMap) -> int:
    """How many indices of all axes of parameters can go."""
    stays = np.zeros(len(found.classes), dtype=bool)
    stays[found.stays] = True
    return sum(int((~stays[classes]).sum()) for slot, classes in found.slots.items() if not slot.constant)
