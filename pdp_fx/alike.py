"""Names that differ only in their numbers, written as one: ``layer{1-2}.0`` for ``layer1.0, layer2.0``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

Item = TypeVar("Item")

NUMBER = re.compile(r"\d+")


def skeleton(name: str) -> str:
    """The name with every number replaced, so that alike names have the same skeleton."""
    return NUMBER.sub("#", name)


def pattern(names: Sequence[str]) -> str:
    """One text for several names with the same skeleton.

    Example:
        >>> pattern(["block1.conv2", "block2.conv2", "block4.conv2"])
        'block{1-2,4}.conv2'
    """
    columns = [set(column) for column in zip(*map(NUMBER.findall, names), strict=True)]
    # A number that is alike in all keeps its leading zeros.
    numbers = iter(
        [*column][0] if len(column) == 1 else _numbers(sorted(map(int, column))) for column in columns
    )
    return NUMBER.sub(lambda _: next(numbers), names[0])


def patterns(names: Iterable[str]) -> list[str]:
    """The names with alike ones written as one, in the order of the first of each."""
    return [pattern(alike) for alike in collected(dict.fromkeys(names), skeleton)]


def few(names: Sequence[str], most: int = 3) -> str:
    """The names as a list that does not get long.

    Example:
        >>> few(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def collected(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items with the same key together, in the order of the first of each."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _numbers(values: list[int]) -> str:
    """Sorted numbers as a list of runs; a single one stands alone."""
    if len(values) == 1:
        return str(values[0])
    runs = [
        [value for _, value in run] for _, run in groupby(enumerate(values), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{{{','.join(texts)}}}"
