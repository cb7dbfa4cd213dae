"""Rules for operations that contract an axis: convolution, matrix products, embedding.

A contraction ties its weight's input axis to the channels that it reads, and produces new channels from the
weight's output axis. A channel can be dropped exactly only if its contribution is 0: because what is read is
0, or else because the weight's columns are masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.labels import Layer, shaped
from pdp_fx.channels.record import Call
from pdp_fx.channels.rules_pointwise import put_sum

aten = torch.ops.aten

SWEPT = "it lies along an axis that a convolution sweeps"
BETWEEN = "it lies along both axes of a matrix"
KERNELS = "it lies along another axis of a convolution's weight than those of channels"


def axis_layer(tensor: Tensor, axis: int, flow: LabelFlow) -> Layer | None:
    """The layer of ``tensor`` that changes along ``axis`` and nowhere else, or None."""
    return along(list(flow.layers(tensor)), axis)


def along(layers: list[Layer], axis: int) -> Layer | None:
    """The layer that changes along ``axis`` and nowhere else, or None."""
    return next((layer for layer in layers if layer.support == frozenset({axis})), None)


def channel_layer(tensor: Tensor, axis: int, flow: LabelFlow, why: str) -> Layer | None:
    """The layer of ``tensor`` along ``axis``, or None; dropping along any other axis is forbidden."""
    others = frozenset(range(tensor.ndim)) - {axis}
    return along(flow.all_without(flow.layers(tensor), others, why), axis)


def keep_others(weight: Tensor, flow: LabelFlow, why: str) -> None:
    """Freeze what lies along no rows or columns of a weight, unless it belongs to parameters."""
    for layer in flow.layers(weight):
        if len(layer.support) > 1 or (not layer.support <= {0, 1} and weight not in flow.stored):
            flow.freeze(layer.ids, why)


def consume(read: Layer | None, columns: Layer | None, flow: LabelFlow) -> None:
    """Contract the channels ``read`` with a weight's ``columns``, which are tied to them."""
    if read is None and columns is None:
        return
    if read is None or columns is None:
        known = read or columns
        if known is not None:
            flow.freeze(known.ids, "it is contracted with values that have no channels")
        return
    flow.tie(read.ids.reshape(-1), columns.ids.reshape(-1))
    if read.all_zero:
        flow.demand(read)
    elif columns.all_zero:
        flow.demand(columns)
    else:
        why, unmasked = "a dropped channel is not 0 when it is read here", flow.unmasked(columns, read)
        flow.freeze(read.ids, f"{why}, and {unmasked}" if unmasked else why)


@rule(aten.convolution, aten._convolution)
def convolution(call: Call, flow: LabelFlow) -> None:
    """Any convolution: plain, grouped, depthwise or transposed, in one to three dimensions."""
    source, weight, bias = call.args[:3]
    transposed, groups = bool(call.args[6]), int(call.args[8])
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    channel_axis = source.ndim - (weight.ndim - 1)
    swept = _swept(call) | {channel_axis}
    passed = [e for e in flow.layers(source) if len(e.support) == 1 and not e.support & swept]
    others = [e for e in flow.layers(source) if all(e is not each for each in passed)]
    blocked = frozenset(range(source.ndim)) - {channel_axis}
    read = along(flow.all_without(others, blocked, SWEPT), channel_axis)
    keep_others(weight, flow, KERNELS)
    columns, rows = (0, 1) if transposed else (1, 0)
    parts = (axis_layer(weight, columns, flow), axis_layer(weight, rows, flow))
    per_channel = (
        source.numel() // source.shape[channel_axis] if transposed else call.result.numel() // outputs
    )
    flow.contract(weight, source, per_channel, None if read is None else read.ids.reshape(-1), passed)
    if flow.is_depthwise(weight, groups, source.shape[channel_axis]):
        made = _depthwise(read, weight, bias, outputs // groups if transposed else 1, flow)
    elif groups == 1:
        consume(read, parts[0], flow)
        made = _produce(parts[1], weight, source, bias, flow)
    else:
        if parts[1] is not None:
            flow.produce(parts[1], weight, source)
        made = _grouped(read, parts, bias, (groups, transposed), flow)
    layers = [] if made is None else [_placed(made, channel_axis, call.result.ndim)]
    layers += [Layer(e.ids, e.zero & (bias is None), (e,), free=e.free) for e in passed]
    flow.put(call.result, layers)


def _swept(call: Call) -> set[int]:
    """The axes along which a convolution's kernel, step or padding is more than a point."""
    source, weight = call.args[:2]
    steps, widths, more = (given * 3 for given in (call.args[3], call.args[4], call.args[7]))
    sizes = zip(weight.shape[2:], steps, widths, more, strict=False)
    first = source.ndim - (weight.ndim - 2)
    return {first + axis for axis, size in enumerate(sizes) if size != (1, 1, 0, 0)}


@rule("torchvision::deform_conv2d")
def deformed_convolution(call: Call, flow: LabelFlow) -> None:
    """A convolution whose pixels are looked up at offsets, which are the same for all channels of a group."""
    source, weight, offset, mask, bias, *numbers = call.args
    groups, offset_groups = numbers[6:8]
    flow.freeze_all([offset, mask], "these values choose places of another tensor")
    read = channel_layer(source, 1, flow, SWEPT)
    keep_others(weight, flow, KERNELS)
    columns, rows = axis_layer(weight, 1, flow), axis_layer(weight, 0, flow)
    positions = call.result.numel() // weight.shape[0]
    flow.contract(weight, source, positions, None if read is None else read.ids.reshape(-1))
    made = _produce(rows, weight, source, bias, flow) if groups == 1 else None
    if groups == 1:
        consume(read, columns, flow)
    if groups > 1 or offset_groups > 1:
        looked_up = [source] if groups == 1 else [source, weight]
        flow.freeze_all(looked_up, "a deformable convolution has groups of these channels")
    flow.put(call.result, [] if made is None else [_placed(made, 1, 4)])


def _placed(layer: Layer, axis: int, ndim: int) -> Layer:
    return Layer(
        shaped(layer.ids.reshape(-1), axis, ndim), shaped(layer.zero.reshape(-1), axis, ndim), layer.needs
    )


def _with_bias(rows: Layer, bias: Tensor | None, flow: LabelFlow) -> Layer:
    """The output channels of ``rows`` once their bias is added."""
    added = None if bias is None else axis_layer(bias, 0, flow)
    zero = rows.zero.reshape(-1)
    if bias is not None and added is None:
        if bias.numel() > 1:
            flow.freeze(rows.ids, "its bias has no channels")
        return Layer(rows.ids.reshape(-1), torch.zeros_like(zero), (rows,))
    if added is None:
        return Layer(rows.ids.reshape(-1), zero, (rows,))
    flow.tie(rows.ids.reshape(-1), added.ids.reshape(-1))
    return Layer(rows.ids.reshape(-1), zero & added.zero.reshape(-1), (rows, added))


def _produce(
    rows: Layer | None, weight: Tensor, data: Tensor, bias: Tensor | None, flow: LabelFlow
) -> Layer | None:
    """New channels, one for each row of a weight."""
    if rows is None:
        return None
    flow.produce(rows, weight, data)
    return _with_bias(rows, bias, flow)


def _depthwise(
    read: Layer | None, weight: Tensor, bias: Tensor | None, repeats: int, flow: LabelFlow
) -> Layer | None:
    """Tie every channel to its own kernels; with a channel multiplier these make several outputs.

    ``repeats`` is how many outputs each row makes: 1, or the multiplier of a transposed weight.
    """
    rows = axis_layer(weight, 0, flow)
    if rows is None:
        if read is not None:
            flow.freeze(read.ids, "their kernels in a depthwise convolution are no channels")
        return None
    if read is None:
        flow.freeze(rows.ids, "a depthwise convolution passes on values that have no channels")
    else:
        flow.tie(rows.ids.reshape(read.ids.numel(), -1), read.ids.reshape(-1, 1))
    if repeats > 1:
        ids, zero = rows.ids.reshape(-1), rows.zero.reshape(-1)
        rows = Layer(ids.repeat_interleave(repeats), zero.repeat_interleave(repeats), (rows,))
    return _with_bias(rows, bias, flow)


def _grouped(
    read: Layer | None,
    parts: tuple[Layer | None, Layer | None],
    bias: Tensor | None,
    kind: tuple[int, bool],
    flow: LabelFlow,
) -> Layer | None:
    """Keep groups of equal size: channels at the same position of every group are tied."""
    columns, rows = parts
    groups, transposed = kind
    for layer in (read, columns if transposed else rows):
        if layer is not None:
            grid = layer.ids.reshape(groups, -1)
            flow.bind(grid, grid[:1])
    if transposed:
        consume(read, columns, flow)
        return _transposed_rows(rows, groups, bias, flow)
    first = None if read is None else _first_group(read, groups)
    consume(first, columns, flow)
    if read is not None and first is not None and first.all_zero:
        flow.demand(read)
    return None if rows is None else _with_bias(rows, bias, flow)


def _first_group(read: Layer, groups: int) -> Layer:
    """The channels of the first group, which are 0 only where the tied channels of all groups are."""
    zero = read.zero.reshape(groups, -1).all(dim=0)
    return Layer(read.ids.reshape(groups, -1)[0], zero, (read,))


def _transposed_rows(rows: Layer | None, groups: int, bias: Tensor | None, flow: LabelFlow) -> Layer | None:
    """A transposed weight holds each output place once, for all groups."""
    if rows is None:
        return None
    repeated = Layer(rows.ids.reshape(-1).repeat(groups), rows.zero.reshape(-1).repeat(groups), (rows,))
    return _with_bias(repeated, bias, flow)


@rule(aten.mm)
def mm(call: Call, flow: LabelFlow) -> None:
    """A product of two matrices."""
    _multiply(call, (call.args[0], call.args[1]), None, flow)


@rule(aten.addmm)
def addmm(call: Call, flow: LabelFlow) -> None:
    """A product of two matrices and a bias."""
    _multiply(call, (call.args[1], call.args[2]), call.args[0], flow)


@rule(aten._sparse_addmm)
def sparse_addmm(call: Call, flow: LabelFlow) -> None:
    """A product of a sparse and a dense matrix, which `torch.sparse.mm` adds to no times an empty matrix."""
    added = call.args[0] if call.argument(3, "beta", 1) else None
    _multiply(call, (call.args[1], call.args[2]), added, flow)


def _multiply(call: Call, operands: tuple[Tensor, Tensor], added: Tensor | None, flow: LabelFlow) -> None:
    """Contract the columns of the left operand with the rows of the right one."""
    left, right = operands
    given, weights = _contracted(left, 1, flow), _contracted(right, 0, flow)
    read, columns = along(given, 1), along(weights, 0)
    count_product(left, right, (read, columns), flow)
    consume(read, columns, flow)
    rows, made = along(given, 0), along(weights, 1)
    if rows is not None:
        flow.produce(rows, left, right)
    if made is not None:
        flow.produce(made, right, left)
    put_sum([layer for layer in (rows, made) if layer is not None], added, call, flow)


def _contracted(operand: Tensor, axis: int, flow: LabelFlow) -> list[Layer]:
    """The layers of an operand; of one that lies along both axes what is left along the contracted one.

    A weight's are frozen. Other operands may be views, such as tokens of which each has the same channels.
    """
    if operand in flow.stored:
        keep_others(operand, flow, BETWEEN)
        return list(flow.layers(operand))
    layers = list(flow.layers(operand))
    wide = [layer for layer in layers if len(layer.support) > 1]
    left = flow.all_without(wide, frozenset({1 - axis}), BETWEEN)
    return left + [layer for layer in layers if len(layer.support) < 2]


def count_product(
    left: Tensor, right: Tensor, read: tuple[Layer | None, Layer | None], flow: LabelFlow
) -> None:
    """Count a product, of stacks of matrices too, if an operand is stored and dense.

    ``read`` is what each operand reads.
    """
    for weight, other, axis, inputs in ((right, left, -2, read[0]), (left, right, -1, read[1])):
        if weight in flow.stored and weight.layout is torch.strided:
            # Of a stack of matrices each has its part of what it is multiplied with.
            rows = weight.shape[axis] * math.prod(weight.shape[:-2])
            positions = other.numel() // max(rows, 1)
            # The weight's contracted axis and the axis of the other operand that is left lie alike.
            left_axis = frozenset({other.ndim + axis})
            across = [layer for layer in flow.layers(other) if layer.support == left_axis]
            ids = None if inputs is None else inputs.ids.reshape(-1)
            flow.contract(weight, other, positions, ids, across)
            return


@rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_product(call: Call, flow: LabelFlow) -> None:
    """(S, k) times one of the (E, k, m) matrices for each row, as in a mixture of experts: m channels."""
    data, weight, *others = call.args
    if data.ndim != 2 or weight.ndim != 3 or any(other is not None for other in others[1:]):
        flow.freeze_all(call.tensors(), "there is no channel rule for this kind of grouped product")
        flow.put(call.result, ())
        return
    flow.freeze_all(call.tensors()[2:], "these values say where groups end")
    read = channel_layer(data, 1, flow, "each row of data has one of the matrices")
    layers = flow.all_without(flow.layers(weight), frozenset({0}), "rows of data choose among these matrices")
    for layer in layers:
        if len(layer.support) > 1:
            flow.freeze(layer.ids, BETWEEN)
    if call.func.namespace == "aten":
        read_rows = [] if read is None else [read]
        flow.record.aligned += [layer.ids.reshape(-1).numpy() for layer in (*layers, *read_rows)]
    uses = data.shape[0] / weight.shape[0]
    flow.contract(weight, data, uses, None if read is None else read.ids.reshape(-1))
    consume(read, along(layers, 1), flow)
    made = _produce(along(layers, 2), weight, data, None, flow)
    flow.put(call.result, [] if made is None else [_placed(made, 1, 2)])


@rule(aten.mv)
def mv(call: Call, flow: LabelFlow) -> None:
    """A product of a matrix and a vector."""
    _times_vector(call, (call.args[0], call.args[1]), None, flow)


@rule(aten.addmv)
def addmv(call: Call, flow: LabelFlow) -> None:
    """A product of a matrix and a vector, and a vector that is added."""
    _times_vector(call, (call.args[1], call.args[2]), call.args[0], flow)


def _times_vector(call: Call, operands: tuple[Tensor, Tensor], added: Tensor | None, flow: LabelFlow) -> None:
    """Contract the columns of a matrix with a vector."""
    matrix, vector = operands
    keep_others(matrix, flow, BETWEEN)
    consume(axis_layer(matrix, 1, flow), axis_layer(vector, 0, flow), flow)
    made = _produce(axis_layer(matrix, 0, flow), matrix, vector, None, flow)
    weight, data = (vector, matrix) if vector in flow.stored else (matrix, vector)
    flow.contract(weight, data, data.numel() // vector.numel(), None)
    put_sum([] if made is None else [_placed(made, 0, 1)], added, call, flow)


@rule(aten.dot, aten.vdot)
def dot(call: Call, flow: LabelFlow) -> None:
    """A product of two vectors."""
    consume(axis_layer(call.args[0], 0, flow), axis_layer(call.args[1], 0, flow), flow)
    flow.put(call.result, ())


@rule(aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding(call: Call, flow: LabelFlow) -> None:
    """A table's columns are new channels; its entries stay. A bag is their sum, mean or maximum."""
    table, *others = call.tensors()
    flow.freeze_all(others, "these values choose or weight the entries of an embedding table")
    result, *rest = [call.result] if isinstance(call.result, Tensor) else call.result
    keep_others(table, flow, "it lies along both axes of an embedding table")
    entries, columns = axis_layer(table, 0, flow), axis_layer(table, 1, flow)
    if entries is not None:
        flow.freeze(entries.ids, "the entries of an embedding table are chosen by its input")
    for tensor in rest:
        flow.put(tensor, ())
    if columns is None:
        flow.put(result, ())
        return
    flow.produce(columns, table, call.args[1])
    flow.put(result, [_placed(_with_bias(columns, None, flow), result.ndim - 1, result.ndim)])
