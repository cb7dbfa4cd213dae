"""How to update a subscript of a tensor, such as x[:, 3:, [0, 2]], for the channels that stay."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from torch import fx

from pdp_fx.channels.kept import Kept, are_distinct
from pdp_fx.channels.labels import first_line
from pdp_fx.channels.record import Record
from pdp_fx.channels.resizing import Job
from pdp_fx.channels.written_sizes import hold_to_size


def _parts(node: fx.Node) -> list[Any]:
    subscript: Any = node.args[1]
    return (
        list(subscript) if isinstance(subscript, (tuple, list)) and not _is_index(subscript) else [subscript]
    )


def _is_index(part: Any) -> bool:
    """Whether a part of a subscript picks several places: a list of numbers, or a node (a tensor)."""
    return isinstance(part, list) and all(isinstance(item, int) for item in part)


def _placed(parts: list[Any], rank: int) -> list[tuple[int, int]]:
    """The position of every part of a subscript, with the tensor axis that it indexes."""
    consumed = sum(part is not None and part is not Ellipsis for part in parts)
    placed: list[tuple[int, int]] = []
    axis = 0
    for place, part in enumerate(parts):
        if part is Ellipsis:
            axis += rank - consumed
        elif part is not None:
            placed.append((place, axis))
            axis += 1
    return placed


def subscript_fits(node: fx.Node, record: Record) -> bool:
    """Fits numbers, slices, and at most one list of indices; picked channels must have distinct labels.

    Several lists, such as the numbers of images and of points in them, or a tensor of one number, fit along
    axes without channels, if of the channels nothing is chosen. Assigning to picked channels does not fit:
    without a result, its labels cannot say what was picked. A slice of channels that leaves gaps becomes a
    list.
    """
    source = node.args[0]
    values = record.values_of(source)
    parts = _parts(node)
    known = (int, slice, fx.Node)
    plain = all(p is None or p is Ellipsis or isinstance(p, known) or _is_index(p) for p in parts)
    plain = plain and not any(_is_tensor(bound, record) for part in parts for bound in _bounds(part))
    if len(values) != 1 or not plain:
        return False
    layers, rank = values[0].layers, len(values[0].shape)
    labelled = frozenset[int]().union(*(layer.support for layer in layers))
    placed = [(parts[place], axis) for place, axis in _placed(parts, rank)]
    lists = [part for part, axis in placed if _is_list(part, record) or (_picks(part) and axis in labelled)]
    if len(lists) > 1 or any(_is_single(part, record) for part, _ in placed):
        whole = not any(axis in labelled and _chooses(part) for part, axis in placed)
        return whole and not any(_is_wide_mask(part, record) for part in parts)
    if _fills_where(node, record):
        return True
    picked = {axis for part, axis in placed if _picks(part)} - varying_axes(node, record)
    among = [layer for layer in layers if layer.support & picked]
    return not among if node.target is operator.setitem else all(are_distinct(layer.ids) for layer in among)


def _is_wide_mask(part: Any, record: Record) -> bool:
    """Whether a part of a subscript is a mask of several axes, behind which parts are not where they seem."""
    name = getattr(part, "name", "")
    return name in record.masks and any(len(value.shape) != 1 for value in record.values.get(name, ()))


def _is_list(part: Any, record: Record) -> bool:
    """Whether a part of a subscript picks several places by their numbers or by a mask."""
    return _is_index(part) or _is_tensor(part, record)


def _is_single(part: Any, record: Record) -> bool:
    """Whether a part of a subscript is a tensor without axes, which takes the place of a number."""
    return _is_tensor(part, record) and any(value.shape == () for value in record.values.get(part.name, ()))


def varying_axes(node: fx.Node, record: Record) -> frozenset[int]:
    """The axes whose channels must stay: the next call may pick others, or they cannot be followed."""
    source = node.args[0]
    values = record.values_of(source)
    parts = _parts(node)
    if len(values) != 1 or _fills_where(node, record):
        return frozenset()
    rank = len(values[0].shape)
    varying = [axis for place, axis in _placed(parts, rank) if _is_varying(parts[place], record)]
    return frozenset(varying) | _spreads(parts, rank, record)


def _fills_where(node: fx.Node, record: Record) -> bool:
    """Whether a node writes one number wherever a mask is True; the mask follows the channels by itself."""
    if node.target is not operator.setitem:
        return False
    (mask, *others), value = _parts(node), node.args[2]
    one = not isinstance(value, fx.Node) or all(each.shape == () for each in record.values_of(value))
    return one and getattr(mask, "name", "") in record.masks and not any(map(_chooses, others))


def _bounds(part: Any) -> tuple[Any, ...]:
    return (part.start, part.stop, part.step) if isinstance(part, slice) else ()


def _is_varying(part: Any, record: Record) -> bool:
    return any(getattr(bound, "name", "") in record.varying for bound in _bounds(part) or (part,))


def _picks(part: Any) -> bool:
    """Whether a part of a subscript may leave gaps: anything but a number or a slice of step 1."""
    return not isinstance(part, int) and not (isinstance(part, slice) and part.step in (None, 1))


def _is_tensor(part: Any, record: Record) -> bool:
    return isinstance(part, fx.Node) and part.name not in record.numbers


def _spreads(parts: list[Any], rank: int, record: Record) -> frozenset[int]:
    """The axes whose channels cannot be followed, for a tensor of several axes picks along or before them.

    Numbers in several axes pick along one axis, and what other parts pick behind it is moved. A mask covers
    as many axes as it has itself, so that other parts do not index the axes that their positions say.
    """
    for place, axis in _placed(parts, rank):
        name = parts[place].name if _is_tensor(parts[place], record) else ""
        count = max((len(value.shape) for value in record.values.get(name, ())), default=0)
        if count < 2:
            continue
        behind = [other for later, other in _placed(parts, rank) if later > place and _chooses(parts[later])]
        if name not in record.masks:
            return frozenset({axis, *behind})
        if behind or any(part is Ellipsis for part in parts[:place]):
            return frozenset(range(rank))
        return frozenset(range(axis, axis + count))
    return frozenset()


def _chooses(part: Any) -> bool:
    """Whether a part of a subscript is more than a colon."""
    return not isinstance(part, slice) or part != slice(None)


def subscript(node: fx.Node, job: Job) -> None:
    """Update the subscript for the indices that stay."""
    parts = _parts(node)
    source = job.source
    for place, axis in _placed(parts, len(source.value.shape)):
        part, at = parts[place], axis + _moved(parts[:place], job)
        bounds = _bounds(part) or (part,)
        if node.target is operator.setitem and isinstance(part, fx.Node) and part.name not in job.numbers:
            # A mask, which has lost what the channels have.
            continue
        if not _chooses(part) or not source.changes(axis):
            continue
        size = source.value.shape[axis]
        if isinstance(part, slice):
            start, stop, step = slice(*(job.number(bound) for bound in bounds)).indices(size)
            if step == 1:
                hold_to_size(node, source, axis)
                given = map(job.number, bounds[:2])
                parts[place] = _between(source, axis, (start, max(stop, start)), *given)
                continue
        number = (
            job.number(part) if isinstance(part, int) or getattr(part, "name", "") in job.numbers else None
        )
        if isinstance(number, int):
            parts[place] = source.placed(axis, number)
        else:
            parts[place] = chosen(job, axis, at)
    whole = isinstance(node.args[1], (tuple, list)) and not _is_index(node.args[1])
    node.args = (node.args[0], tuple(parts) if whole else parts[0], *node.args[2:])


def _between(source: Kept, axis: int, at: tuple[int, int], start: Any, stop: Any) -> slice:
    """The slice of what stays between two positions; each bound counts from where the given one does."""
    first, last = (source.before(axis, position) for position in at)
    size = source.size(axis)
    if start is None:
        first = None
    elif start < 0 and first < size:
        first -= size
    if stop is None or stop < 0:
        last = (last - size) or None
    return slice(first, last)


def _moved(parts: list[Any], job: Job) -> int:
    """By how many axes the result's are behind the source's, after these parts of a subscript."""
    numbers = [part for part in parts if isinstance(part, int) or getattr(part, "name", "") in job.numbers]
    return sum(part is None for part in parts) - len(numbers)


def chosen(job: Job, axis: int, at: int) -> list[int]:
    """The indices, among those that stay along ``axis``, that the result has along ``at``, in its order.

    They follow from the labels: those of the result are labels of the source, chosen and reordered.
    """
    source, place_of = job.source.labels(axis), dict[int, int]()
    for place in range(source.shape[axis]):
        place_of |= dict.fromkeys(source.select(axis, place).reshape(-1).tolist(), place)
    result = job.results[0]
    layers = (layer.ids for layer in result.value.layers)
    found = next((ids for ids in layers if place_of.keys() >= set(ids.reshape(-1).tolist())), None)
    if found is None:
        return []
    line = first_line(found, at).expand(result.value.shape[at]).tolist()
    left = result.stays.get(at, np.ones(len(line), dtype=bool))
    rank = np.cumsum(job.source.stays[axis]) - 1
    return [int(rank[place_of[label]]) for label, stays in zip(line, left, strict=True) if stays]
