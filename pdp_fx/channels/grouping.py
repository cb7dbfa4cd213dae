"""Collecting classes into groups, with the producers, members, reasons and parts of each group.

A class is identified by one of its labels, so everything that is known of classes is in arrays indexed by
labels. The cost grows with the number of labels, not with groups times labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdp_fx.channels.channel_map import ChannelGroup
from pdp_fx.channels.labels import Reason, Slot

Make = tuple[Slot, np.ndarray]
"""A weight axis, and the classes that it produces, in order."""

Stay = tuple[np.ndarray, Reason]
"""Classes that have to stay, and why."""


@dataclass(frozen=True)
class _Places:
    """Where every class is.

    Attributes:
        group: the group of every class, or -1 if nothing produces it.
        place: its position in the group.
        widths: the width of each group.
    """

    group: np.ndarray
    place: np.ndarray
    widths: np.ndarray

    def holders(self, items: Sequence[np.ndarray]) -> list[list[int]]:
        """For each group the indices of the items that contain some of its classes.

        They are ordered by the first position of the group that the item contains, then by the item's index.
        """
        found: list[list[int]] = [[] for _ in self.widths]
        if not items:
            return found
        classes = np.concatenate(items)
        item = np.repeat(np.arange(len(items)), [len(one) for one in items])
        group, place = self.group[classes], self.place[classes]
        group, place, item = group[group >= 0], place[group >= 0], item[group >= 0]
        span = int(self.widths.max(initial=1))
        # Sorting one number for each triple is much faster than sorting by three columns.
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
    """Collect the classes that the same weight axes produce into groups.

    Classes that must stay form groups apart from those that may go.

    Args:
        slots: the class of every index of every axis of a parameter, buffer or constant.
        makes: the weight axes that produce channels.
        stays: the classes that must stay, each with a reason.
        parts: the classes of parts that are split off or picked out of channels.
        labels: the number of labels.
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
    """Which weight axes produce which classes.

    Returns:
        The classes that are produced, in order; the sets of weight axes, of which the first is empty; and for
        every class the index of the set that produces it.
    """
    origins: list[tuple[Slot, ...]] = [()]
    origin = np.zeros(labels, dtype=np.int64)
    for slot, classes in makes:
        before = origin[classes]
        for number in distinct(before).tolist():
            if slot not in origins[number]:
                origin[classes[before == number]] = len(origins)
                origins.append((*origins[number], slot))
    made = concatenated(classes for _, classes in makes)
    first = np.zeros(labels, dtype=np.int64)
    first[made[::-1]] = np.arange(len(made))[::-1]
    return made[first[made] == np.arange(len(made))], origins, origin


def _placed(made: np.ndarray, keys: np.ndarray, labels: int) -> tuple[_Places, list[np.ndarray]]:
    """Group classes with equal keys; the groups and the classes in them keep the order of ``made``."""
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
    """For each group the positions of the parts of which one channel must stay.

    A part needs no care if one of its channels stays anyway: because it is frozen, because nothing produces
    it, or because the part contains a whole group, of which one channel always stays.
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


def concatenated(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Arrays of labels or classes, one behind the other; an empty one if there are none."""
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])


def distinct(numbers: np.ndarray) -> np.ndarray:
    """The distinct numbers of an array, sorted; for short arrays much faster than `numpy.unique`."""
    ordered = np.sort(numbers, axis=None)
    return ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]


def _name(made_by: tuple[Slot, ...], seen: Counter[str]) -> str:
    """The name of the first module that produces the channels, numbered if another group has this name."""
    first = made_by[0].tensor.rpartition(".")[0] or made_by[0].tensor
    seen[first] += 1
    return first if seen[first] == 1 else f"{first} ({seen[first]})"
