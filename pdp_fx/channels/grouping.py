"""Collecting classes into groups: what makes them, what carries them, why they stay, how they are cut.

A class is a number below the number of labels, so everything that is known of classes is kept in arrays
over labels. The cost grows with the number of labels, not with groups times labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdp_fx.channels.channel_map import ChannelGroup
from pdp_fx.channels.labels import Reason, Slot

Make = tuple[Slot, np.ndarray]
"""A weight axis, and the classes that it makes, in order."""

Stay = tuple[np.ndarray, Reason]
"""Classes that have to stay, and why."""


@dataclass(frozen=True)
class _Places:
    """The group of every class, or -1 if nothing makes it, its place there, and the width of each group."""

    group: np.ndarray
    place: np.ndarray
    widths: np.ndarray

    def holders(self, items: Sequence[np.ndarray]) -> list[list[int]]:
        """For each group the numbers of the items that hold some of its classes.

        An item that holds an earlier place of the group comes first; then the earlier item.
        """
        found: list[list[int]] = [[] for _ in self.widths]
        if not items:
            return found
        classes = np.concatenate(items)
        item = np.repeat(np.arange(len(items)), [len(one) for one in items])
        group, place = self.group[classes], self.place[classes]
        group, place, item = group[group >= 0], place[group >= 0], item[group >= 0]
        span = int(self.widths.max(initial=1))
        # One number for each triple sorts much faster than three columns do.
        first = np.sort((group * len(items) + item) * span + place)
        pair, place = first // span, first % span
        earliest = np.diff(pair, prepend=-1) > 0
        group, item = pair[earliest] // len(items), pair[earliest] % len(items)
        ordered = np.sort((group * span + place[earliest]) * len(items) + item)
        for key in ordered.tolist():
            found[key // len(items) // span].append(key % len(items))
        return found


def collect_groups(
    slots: dict[Slot, np.ndarray],
    makes: Sequence[Make],
    stays: Sequence[Stay],
    parts: Iterable[np.ndarray],
    labels: int,
) -> list[ChannelGroup]:
    """Collect classes that the same weight axes make; those that stay apart from those that may go.

    Args:
        slots: the class of every index of every parameter and buffer axis.
        makes: what makes channels.
        stays: the classes that have to stay, each with a reason.
        parts: the classes of parts that are cut out of channels.
        labels: how many labels there are.
    """
    made, origins, origin = _makers(makes, labels)
    is_frozen = np.zeros(labels, dtype=bool)
    for classes, _ in stays:
        is_frozen[classes] = True
    places, groups = _placed(made, origin[made] * 2 + is_frozen[made], labels)
    names, members = list(slots), places.holders(list(slots.values()))
    reasons = places.holders([classes for classes, _ in stays])
    cuts = _cuts(places, parts, (places.group >= 0) & ~is_frozen)
    seen: Counter[str] = Counter()
    found: list[ChannelGroup] = []
    for number, classes in enumerate(groups):
        made_by = origins[int(origin[classes[0]])]
        found.append(
            ChannelGroup(
                _name(made_by, seen),
                classes,
                made_by,
                tuple(names[slot] for slot in members[number]),
                tuple(dict.fromkeys(stays[stay][1] for stay in reasons[number])),
                tuple(cuts[number]),
            )
        )
    return found


def _makers(makes: Sequence[Make], labels: int) -> tuple[np.ndarray, list[tuple[Slot, ...]], np.ndarray]:
    """The classes that are made, in order; sets of weight axes; and which set makes each class."""
    origins: list[tuple[Slot, ...]] = [()]
    origin = np.zeros(labels, dtype=np.int64)
    for slot, classes in makes:
        before = origin[classes]
        for number in distinct(before).tolist():
            if slot not in origins[number]:
                origin[classes[before == number]] = len(origins)
                origins.append((*origins[number], slot))
    made = np.concatenate([np.empty(0, dtype=np.int64), *(classes for _, classes in makes)])
    first = np.zeros(labels, dtype=np.int64)
    first[made[::-1]] = np.arange(len(made))[::-1]
    return made[first[made] == np.arange(len(made))], origins, origin


def _placed(made: np.ndarray, keys: np.ndarray, labels: int) -> tuple[_Places, list[np.ndarray]]:
    """Let classes of one key form a group; groups and their classes keep the order of ``made``."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[inverse]
    order = np.argsort(number, kind="stable")
    widths = np.bincount(number, minlength=len(first))
    starts = np.cumsum(widths) - widths
    group, place = np.full(labels, -1), np.zeros(labels, dtype=np.int64)
    group[made] = number
    place[made[order]] = np.arange(len(made)) - np.repeat(starts, widths)
    return _Places(group, place, widths), np.split(made[order], starts[1:]) if len(made) else []


def _cuts(places: _Places, parts: Iterable[np.ndarray], loose: np.ndarray) -> list[list[tuple[int, ...]]]:
    """For each group the places of its channels that are cut apart from the others.

    A part needs no care if one of its channels stays anyway: because it is frozen, because nothing
    makes it, or because the part holds a whole group, of which one channel always stays.
    """
    found: list[dict[tuple[int, ...], None]] = [{} for _ in places.widths]
    for part in {part.tobytes(): part for part in map(distinct, parts)}.values():
        if not len(part) or not loose[part].all():
            continue
        order = np.lexsort((places.place[part], places.group[part]))
        group, place = places.group[part][order], places.place[part][order]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        pieces = np.split(place, starts[1:])
        if all(
            len(piece) < places.widths[number] for number, piece in zip(group[starts], pieces, strict=True)
        ):
            for number, piece in zip(group[starts].tolist(), pieces, strict=True):
                found[number][tuple(piece.tolist())] = None
    return [list(cuts) for cuts in found]


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The distinct numbers of an array, sorted; for short arrays much faster than `numpy.unique`."""
    ordered = np.sort(numbers, axis=None)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]


def _name(made_by: tuple[Slot, ...], seen: Counter[str]) -> str:
    """The first module that makes the channels, numbered if it has made some before."""
    first = made_by[0].tensor.rpartition(".")[0] or made_by[0].tensor
    seen[first] += 1
    return first if seen[first] == 1 else f"{first} ({seen[first]})"
