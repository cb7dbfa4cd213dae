"""Rules for batched products and attention.

A batched product contracts two activations. If channels lie along both a batch axis and a matrix axis (heads
and the dimensions inside a head), the labels are tied along the matrix axis, so that whole heads are kept or
dropped. If they lie along both axes of a matrix, as where a layer makes a weight for each example, what can
go is contracted channels if both operands have some, else those that the product puts out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, compress, shaped
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_compute import along, consume, count_product
from pdp_fx.channels.rules_joining import tie_across
from pdp_fx.channels.rules_layout import keep_single
from pdp_fx.channels.rules_pointwise import lift, put_sum

aten = torch.ops.aten

FUSED = (
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_attention_math, aten._scaled_dot_product_fused_attention_overrideable,
)  # fmt: skip


def matrix_layers(tensor: Tensor, heads: int, order: tuple[int, ...], flow: LabelFlow) -> list[Layer]:
    """The layers of a stack of matrices, of which each is left along one axis.

    What lies along the axis ``heads`` and another one becomes whole heads, or, if those must stay, what all
    heads have inside (`choices`). Other labels that lie along
    several axes, as those of a matrix that a layer makes, are tied until they change along one: the first
    of ``order`` that they have.
    """
    why = "these channels lie along two axes of a matrix"
    layers: list[Layer] = []
    for layer in flow.layers(tensor):
        both = heads in layer.support and not layer.support.isdisjoint(order)
        first = (*order, heads) if both and flow.takes_inner(layer.ids) else (heads, *order)
        keep = next(axis for axis in (*first, min(layer.support)) if axis in layer.support)
        moved = flow.without(layer, layer.support - {keep}, why)
        if moved is not None:
            layers.append(moved)
    return layers


def _has(tensor: Tensor, axis: int, flow: LabelFlow) -> bool:
    """Whether channels lie along an axis of a tensor."""
    return any(axis in layer.support for layer in flow.layers(tensor))


def _vector(layer: Layer | None) -> Layer | None:
    return None if layer is None else Layer(layer.ids.reshape(-1), layer.zero.reshape(-1), (layer,))


@rule(aten.bmm, aten.baddbmm)
def batched_product(call: Call, flow: LabelFlow) -> None:
    """(B, n, k) times (B, k, m): batch labels agree, k is contracted, n and m stay."""
    added = call.args[0] if call.func.overloadpacket is aten.baddbmm else None
    left_tensor, right_tensor = call.args[-2:] if added is None else call.args[1:3]
    contracted = _has(left_tensor, 2, flow) and _has(right_tensor, 1, flow)
    left = matrix_layers(left_tensor, 0, (2, 1) if contracted else (1, 2), flow)
    right = matrix_layers(right_tensor, 0, (1, 2) if contracted else (2, 1), flow)
    consume(_vector(along(left, 2)), _vector(along(right, 1)), flow)
    rows, columns = along(left, 1), along(right, 2)
    if rows is not None:
        flow.produce(rows, left_tensor, right_tensor)
    if columns is not None:
        flow.produce(columns, right_tensor, left_tensor)
    layers = [layer for layer in (rows, columns) if layer is not None]
    count_product(left_tensor, right_tensor, (None, None), flow)
    batch = _batch_layer(_along_batch(left, right), _along_batch(right, left), flow)
    if batch is not None:
        layers.append(batch)
    put_sum(layers, added, call, flow)


@rule(aten.linalg_solve_triangular)
def triangular(call: Call, flow: LabelFlow) -> None:
    """(..., n, n) and (..., n, m) to (..., n, m): columns, and whole systems, are solved alone."""
    matrix, given = call.args[:2]
    inside = (
        (given.ndim - 2, given.ndim - 1)
        if call.argument(3, "left", True)
        else (given.ndim - 1, given.ndim - 2)
    )
    why = "a system of equations mixes these channels"
    mixed = frozenset({matrix.ndim - 2, matrix.ndim - 1})
    systems = lift(tuple(flow.all_without(flow.layers(matrix), mixed, why)), given.ndim)
    theirs = flow.all_without(flow.layers(given), frozenset({inside[0]}), why)
    alone = [layer for layer in theirs if layer.support == frozenset({inside[1]})]
    whole = flow.all_without([layer for layer in theirs if layer not in alone], frozenset({inside[1]}), why)
    across = tie_across([list(whole), list(systems)], flow)
    # It is 0 where what is given is, whatever the matrix.
    flow.put(call.result, [*(_solved(layer.needs[0]) for layer in across), *map(_solved, alone)])


def _solved(layer: Layer) -> Layer:
    return Layer(layer.ids, layer.zero, (layer,))


@rule(aten._cdist_forward, aten._euclidean_dist)
def distances(call: Call, flow: LabelFlow) -> None:
    """(..., n, k) and (..., m, k) to (..., n, m): a channel that is 0 on both sides changes no distance."""
    sides = [(tensor.ndim, _matrices(tensor, flow)) for tensor in call.args[:2]]
    measured = [along(layers, ndim - 1) for ndim, layers in sides]
    vanish = [layer for layer in measured if layer is not None and layer.all_zero]
    for layer in measured:
        if layer is not None and len(vanish) < 2:
            flow.freeze(layer.ids, "a dropped channel is not 0 on both sides of a distance")
    if len(vanish) == 2:
        flow.tie(*(layer.ids.reshape(-1) for layer in vanish))
        for layer in vanish:
            flow.demand(layer)
    made: list[Layer] = []
    for (ndim, layers), axis in zip(sides, (-2, -1), strict=True):
        places = along(layers, ndim - 2)
        if places is not None:
            ids = shaped(places.ids.reshape(-1), axis, call.result.ndim)
            made.append(Layer(ids, torch.zeros_like(ids, dtype=torch.bool), (places,)))
    flow.put(call.result, made)


def _matrices(tensor: Tensor, flow: LabelFlow) -> list[Layer]:
    """The layers along the rows or the columns of a stack of matrices; others stay."""
    why = "these channels lie along another axis than the vectors or their places"
    stacked = frozenset(range(tensor.ndim - 2))
    kept = flow.all_without(flow.layers(tensor), stacked, why)
    for layer in kept:
        if len(layer.support) > 1:
            flow.freeze(layer.ids, "these channels lie along two axes of a matrix")
    return [layer for layer in kept if len(layer.support) == 1]


def _along_batch(layers: list[Layer], others: list[Layer]) -> Layer | None:
    """The layer of the batch axis; of several, as a constant has, the one that repeats as the other's."""
    found = [layer for layer in layers if layer.support == frozenset({0})]
    if len(found) < 2:
        return next(iter(found), None)
    theirs = [_repeats(layer) for layer in others if layer.support == frozenset({0})]
    alike = [layer for layer in found if any(torch.equal(_repeats(layer), each) for each in theirs)]
    return (alike or found)[0]


def _repeats(layer: Layer) -> Tensor:
    """For each index the first one that has the same label."""
    labels, places = layer.ids.reshape(-1).unique(return_inverse=True)
    numbers = torch.arange(len(places))
    first = torch.full_like(labels, len(places)).scatter_reduce(0, places, numbers, "amin")
    return first[places]


def _batch_layer(left: Layer | None, right: Layer | None, flow: LabelFlow) -> Layer | None:
    """The layer of the batch axis of a product; a slice of it is 0 if either operand's is."""
    if left is None or right is None:
        known = left or right
        if known is not None:
            flow.freeze(known.ids, "a batched product joins these channels with values that have none")
        return None
    flow.tie(left.ids, right.ids)
    source = left if left.all_zero else right
    return Layer(left.ids, left.zero | right.zero, (source,) if source.all_zero else (left, right))


@rule(*FUSED)
def attention(call: Call, flow: LabelFlow) -> None:
    """Heads of q, k and v go together; the dimensions of q and k are contracted."""
    result = call.result[0] if isinstance(call.result, (tuple, list)) else call.result
    head, token, inner = (result.ndim - 3, result.ndim - 2, result.ndim - 1)
    contracted = all(_has(tensor, inner, flow) for tensor in call.args[:2])
    query = matrix_layers(call.args[0], head, (inner, token) if contracted else (token, inner), flow)
    key, value = (matrix_layers(tensor, head, (inner, token), flow) for tensor in call.args[1:3])
    for name, layers, stays in (
        ("query", query, {head, token, inner}),
        ("key", key, {head, inner}),
        ("value", value, {head, inner}),
    ):
        for layer in layers:
            if not layer.support <= stays:
                flow.freeze(layer.ids, f"attention contracts this axis of its {name}")
    consume(_vector(along(query, inner)), _vector(along(key, inner)), flow)
    heads = [_repeated(along(layers, head), result.shape[head]) for layers in (query, key, value)]
    known = [layer for layer in heads if layer is not None]
    if known and len(known) < 3:
        for layer in known:
            flow.freeze(layer.ids, "attention joins these heads with values that have none")
        heads = [None, None, None]
    kept: list[Layer] = []
    if heads[2] is not None:
        for layer in known:
            flow.tie(layer.ids, heads[2].ids)
        # Several heads of the query may share one of the value: its labels tell them apart.
        kept.append(Layer(known[0].ids, heads[2].zero, (heads[2],), free=all(h.free for h in known)))
    for mask in call.tensors()[3:]:
        _tie_mask(mask, head, result.ndim, heads[2], flow)
    inside, tokens = along(value, inner), along(query, token)
    kept += [layer for layer in (inside,) if layer is not None]
    kept += [Layer(t.ids, torch.zeros_like(t.zero), (t,)) for t in (tokens,) if t is not None]
    flow.put(result, kept)


def _repeated(layer: Layer | None, heads: int) -> Layer | None:
    """Heads of a key or value shared by several query heads, one label for each query head."""
    if layer is None:
        return None
    axis = next(iter(layer.support))
    times = heads // layer.ids.shape[axis]
    if times == 1:
        return layer
    ids, zero = layer.ids.repeat_interleave(times, axis), layer.zero.repeat_interleave(times, axis)
    return Layer(ids, zero, (layer,))


def _tie_mask(mask: Tensor, head: int, rank: int, heads: Layer | None, flow: LabelFlow) -> None:
    """Tie the heads of an attention mask to those of q, k and v, or freeze what it has no heads for."""
    place = head - (rank - mask.ndim)
    own = [layer for layer in flow.layers(mask) if layer.support == frozenset({place})]
    for layer in flow.layers(mask):
        if layer in own and heads is not None:
            flow.tie(layer.ids.reshape(-1), heads.ids.reshape(-1))
        else:
            flow.freeze(layer.ids, "it lies along an axis of an attention mask")
    if heads is not None and not own and 0 <= place < mask.ndim and mask.shape[place] > 1:
        flow.freeze(heads.ids, "attention adds a mask with values for every head")


@rule(aten.glu)
def glu(call: Call, flow: LabelFlow) -> None:
    """The two halves of a gated unit go together; the result is 0 where the first half is."""
    source = call.args[0]
    axis = int(call.argument(1, "dim", -1)) % source.ndim
    kept: list[Layer] = []
    for layer in flow.layers(source):
        if axis not in layer.support:
            kept.append(Layer(layer.ids, layer.zero, (layer,)))
            continue
        value, gate = layer.ids.chunk(2, axis)
        flow.tie(value, gate)
        ids, zero = compress(value, layer.zero.chunk(2, axis)[0])
        kept.append(Layer(ids, zero, (layer,)))
        keep_single(layer, kept[-1], flow)
    flow.put(call.result, kept)
