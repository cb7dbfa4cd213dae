"""Rules for operations that choose positions along one axis by an index; channels along other axes can go."""

from __future__ import annotations

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, from_front, shaped
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_compute import axis_layer
from pdp_fx.channels.rules_joining import tie_across
from pdp_fx.channels.rules_pointwise import lift, pointwise

aten = torch.ops.aten

CHOSEN = "its places along the axis of these channels are chosen by an index"


@rule(
    aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_, aten.index_reduce,
    aten.index_reduce_,
)  # fmt: skip
def rows_by_index(call: Call, flow: LabelFlow) -> None:
    """Whole slices are written to the positions in a vector, such as messages to the nodes of a graph.

    Slices that meet at one position are added, replaced or reduced; the result is surely 0 only if all are.
    """
    into, axis, index, source = call.args[:4]
    flow.freeze_all([index], CHOSEN)
    _chosen(call, axis, [into, source], [], flow)


@rule(aten.index_fill, aten.index_fill_)
def filled_by_index(call: Call, flow: LabelFlow) -> None:
    """Whole slices are filled with one number, at the positions in a vector."""
    into, axis, index, value = call.args[:4]
    flow.freeze_all([index], CHOSEN)
    stays_zero = flow.is_zero(value)
    kept = flow.all_without(flow.layers(into), frozenset({from_front(axis, into.ndim)}), CHOSEN)
    zeros = [layer.zero if stays_zero else torch.zeros_like(layer.zero) for layer in kept]
    flow.put(call.result, [Layer(layer.ids, zero, (layer,)) for layer, zero in zip(kept, zeros, strict=True)])


@rule(aten.scatter_add, aten.scatter_add_, aten.scatter, aten.scatter_)
def scatter(call: Call, flow: LabelFlow) -> None:
    """Every element, or one number, is written to the positions in an index, along one axis."""
    into, axis, index, source = call.args[:4]
    if call.kwargs:
        flow.freeze_all(call.tensors(), CHOSEN)
        flow.put(call.result, ())
        return
    _chosen(call, axis, [into, source] if isinstance(source, Tensor) else [into], [index], flow)
    if not isinstance(source, Tensor) and not flow.is_zero(source):
        filled = [Layer(each.ids, torch.zeros_like(each.zero), (each,)) for each in flow.layers(call.result)]
        flow.put(call.result, filled)


@rule(aten.scatter_reduce, aten.scatter_reduce_)
def scatter_reduce(call: Call, flow: LabelFlow) -> None:
    """As `scatter`; elements that meet at one position are reduced, which surely gives 0 only for zeros."""
    into, axis, index, source = call.args[:4]
    _chosen(call, axis, [into, source], [index], flow)


@rule(aten.slice_scatter)
def slice_scatter(call: Call, flow: LabelFlow) -> None:
    """Some slices are replaced by those of another tensor."""
    into, source = call.args[:2]
    _chosen(call, int(call.argument(2, "dim", 0)), [into, source], [], flow)


@rule(aten.select_scatter)
def select_scatter(call: Call, flow: LabelFlow) -> None:
    """One slice is replaced by another tensor."""
    into, source, axis = call.args[:3]
    axis = from_front(axis, into.ndim)
    slices = source.unsqueeze(axis)
    layers = flow.layers(source)
    flow.put(slices, [Layer(t.ids.unsqueeze(axis), t.zero.unsqueeze(axis), (t,)) for t in layers])
    _chosen(call, axis, [into, slices], [], flow)


@rule(aten.masked_scatter, aten.masked_scatter_)
def masked_scatter(call: Call, flow: LabelFlow) -> None:
    """Rows are replaced by those of another tensor, in order, where a mask is True.

    Whole rows are replaced if the mask is constant along the last axis, as for image features among words.
    """
    into, mask, source = call.args
    last = max(into.ndim - 1, 0)
    same: list[Layer] = []
    for layer in lift(flow.layers(mask), into.ndim):
        if layer.free and layer.support == frozenset({last}):
            same.append(layer)
        else:
            flow.freeze(layer.ids, CHOSEN)
    wide = source.shape[-1:] == into.shape[-1:]
    if not wide or (not same and mask.shape[-1:] != (1,)):
        flow.freeze_all([into, mask, source], CHOSEN)
        flow.put(call.result, ())
        return
    others = frozenset(range(last))
    mine = flow.all_without(flow.layers(into), others, CHOSEN)
    rows = flow.all_without(flow.layers(source), frozenset(range(source.ndim - 1)), CHOSEN)
    theirs = [_with_axes(layer, source.ndim - 1, last) for layer in rows]
    across = [mine, theirs, *([same] if same else [])]
    flow.put(call.result, [_all_zero(merged, 2) for merged in tie_across(across, flow)])


@rule(aten.gather)
def gather(call: Call, flow: LabelFlow) -> None:
    """Every element is picked by its own index, along one axis."""
    source, axis, index = call.args[:3]
    _chosen(call, axis, [source], [index], flow)


@rule(aten._pack_padded_sequence)
def pack_padded_sequence(call: Call, flow: LabelFlow) -> None:
    """As many steps of each sequence as its length says follow one another; channels lie behind them."""
    source, lengths = call.args[:2]
    flow.freeze_all([lengths], CHOSEN)
    kept = flow.all_without(flow.layers(source), frozenset({0, 1}), CHOSEN)
    flow.put(call.result[0], [_with_axes(layer, 2, 1) for layer in kept])


@rule(aten.diagonal)
def diagonal(call: Call, flow: LabelFlow) -> None:
    """Both axes lose the same indices, or none: otherwise the diagonal would run elsewhere."""
    source, result = call.args[0], call.result
    first, second = (int(call.argument(at + 1, f"dim{at}", at - 1)) % source.ndim for at in (1, 2))
    both = frozenset({first, second})
    ends = [layer for axis in (first, second) if (layer := axis_layer(source, axis, flow)) is not None]
    layers: list[Layer] = []
    if len(ends) == 2 and call.result.shape[-1] == source.shape[first] == source.shape[second]:
        flow.tie(ends[0].ids.reshape(-1), ends[1].ids.reshape(-1))
        needs = tuple(layer for layer in ends if layer.all_zero)[:1] or tuple(ends)
        zero = torch.stack([layer.zero.reshape(-1) for layer in ends]).any(dim=0)
        ids = shaped(ends[0].ids.reshape(-1), result.ndim - 1, result.ndim)
        layers.append(Layer(ids, shaped(zero, result.ndim - 1, result.ndim), needs))
    else:
        ends = []
    for layer in flow.layers(source):
        moved = None if layer in ends else flow.without(layer, both, "a diagonal runs across these channels")
        if moved is not None:
            ids, zero = (labels.diagonal(0, first, second) for labels in (moved.ids, moved.zero))
            layers.append(Layer(ids, zero, (moved,)))
    flow.put(result, layers)


@rule(aten.index_put, aten.index_put_, aten._index_put_impl_)
def index_put(call: Call, flow: LabelFlow) -> None:
    """Whole slices are written to the positions of indices or a mask, such as the tokens of an expert."""
    into, indices, values = call.args[:3]
    chosen = {axis: index for axis, index in enumerate(indices) if index is not None}
    if values.ndim == 0 and len(chosen) == 1 and all(map(_is_mask, chosen.values())):
        _filled_where(call, *next(iter(chosen.items())), flow)
        return
    flow.freeze_all(list(chosen.values()), CHOSEN)
    if len(chosen) > 1 and any(_is_mask(index) and index.ndim != 1 for index in chosen.values()):
        flow.freeze_all([into, values], CHOSEN)
        flow.put(call.result, ())
        return
    first, taken, given = _places(chosen)
    rest = [axis for axis in range(into.ndim) if axis not in taken]
    mine = flow.all_without(flow.layers(into), taken, CHOSEN)
    lifted = lift(flow.layers(values), len(rest) + given)
    theirs = flow.all_without(lifted, frozenset(range(first, first + given)), CHOSEN)
    theirs = [_laid_on(layer, rest, into.ndim, range(first, first + given)) for layer in theirs]
    if values.ndim == 0:
        # A number that is 0 now may be another at the next call.
        theirs = [Layer(layer.ids, torch.zeros_like(layer.zero), free=True) for layer in mine]
    flow.put(call.result, [_all_zero(merged, 2) for merged in tie_across([mine, theirs], flow)])


def _filled_where(call: Call, axis: int, mask: Tensor, flow: LabelFlow) -> None:
    """One number is written wherever a mask is True, whose axes are those from ``axis`` on."""
    into, _, value = call.args[:3]
    behind = into.ndim - axis - mask.ndim
    wide = mask.reshape(*[1] * axis, *mask.shape, *[1] * behind)
    shapes = [(1,) * axis + tuple(layer.ids.shape) + (1,) * behind for layer in flow.layers(mask)]
    flow.put(
        wide,
        [
            Layer(layer.ids.reshape(shape), layer.zero.reshape(shape), (layer,), free=layer.free)
            for layer, shape in zip(flow.layers(mask), shapes, strict=True)
        ],
    )
    pointwise(Call(aten.masked_fill.Tensor, (into, wide, value), {}, call.result), flow)


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _places(chosen: dict[int, Tensor]) -> tuple[int, frozenset[int], int]:
    """Where the axes of several indices together come among the values', instead of which, and how many.

    They come in the place of the indexed axes, or before all others if those are not side by side.
    """
    axis, index = next(iter(chosen.items()))
    if len(chosen) == 1 and _is_mask(index):
        return axis, frozenset(range(axis, axis + index.ndim)), 1
    adjacent = max(chosen) - axis == len(chosen) - 1
    return axis if adjacent else 0, frozenset(chosen), max(index.ndim for index in chosen.values())


def _laid_on(layer: Layer, axes: list[int], rank: int, given: range) -> Layer:
    """The layer of written values, without the axes that are ``given``, on these axes of the tensor."""
    sizes = [size for axis, size in enumerate(layer.ids.shape) if axis not in given]
    shape = [1] * rank
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return Layer(layer.ids.reshape(shape), layer.zero.reshape(shape), (layer,))


def _with_axes(layer: Layer, count: int, instead: int) -> Layer:
    """The layer with ``instead`` axes in the place of the first ``count``, along which it does not change."""
    shape = [*([1] * instead), *layer.ids.shape[count:]]
    return Layer(layer.ids.reshape(shape), layer.zero.reshape(shape), (layer,))


def _all_zero(merged: Layer, count: int) -> Layer:
    """The merged layer of several operands, 0 where the first ``count`` of them are."""
    made_of = merged.needs[:count]
    zero = torch.stack(torch.broadcast_tensors(*(layer.zero for layer in made_of))).all(dim=0)
    return Layer(merged.ids, zero, made_of)


def _chosen(call: Call, axis: int, values: list[Tensor], indices: list[Tensor], flow: LabelFlow) -> None:
    """Tie the labels of all operands along the other axes; the result is 0 where all ``values`` are."""
    axis = from_front(axis, call.result.ndim)
    operands = [*values, *indices]
    shapes = {tuple(size for at, size in enumerate(tensor.shape) if at != axis) for tensor in operands}
    if len(shapes) > 1:
        flow.freeze_all(operands, CHOSEN)
        flow.put(call.result, ())
        return
    across = [flow.all_without(flow.layers(tensor), frozenset({axis}), CHOSEN) for tensor in operands]
    flow.put(call.result, [_all_zero(merged, len(values)) for merged in tie_across(across, flow)])
