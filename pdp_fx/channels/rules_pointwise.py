"""Rules for pointwise operations, which tie the channels of their operands.

Whether a dropped channel is exactly 0 in the result is found by a trial, not by a table: the operation is run
on small tensors, with 0 in the operands that are 0 for dropped channels, and other values elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations, count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from pdp_fx.channels.flow import LabelFlow, rule
from pdp_fx.channels.in_place import out_of_place
from pdp_fx.channels.labels import Layer
from pdp_fx.channels.record import Call

aten = torch.ops.aten

BARE_REMEDY = "free what keeps those values, make constants a buffer, or give them a layer of their own"

OTHER_NUMBERS = (-1.0, 0.4, 2.0)
"""What is tried in the place of numbers that vary: one that may be 0 on the example may be anything."""

BREAKS_REMEDY = "add a small number first"

UNTAGGED = frozenset({
    aten._prelu_kernel, aten.hardswish, aten.hardswish_, aten.hardtanh, aten.copy_, aten.complex, aten.polar,
    aten.masked_fill, aten.masked_fill_, aten.rsub, aten.floor_divide, aten.floor_divide_,
    aten.leaky_relu, aten.leaky_relu_, aten._conj_physical,
    aten.elu_backward, aten.hardshrink_backward, aten.hardsigmoid_backward, aten.hardswish_backward,
    aten.hardtanh_backward, aten.leaky_relu_backward, aten.softplus_backward, aten.softshrink_backward,
})  # fmt: skip
"""Pointwise operations of which some overload has no pointwise tag in every supported version of torch."""


@cache
def is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether each output element depends on one (broadcast) element of each operand only.

    Some operations that write in place carry no tags of their own.
    """
    tags = {*func.tags, *out_of_place(func).tags}
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and (torch.Tag.pointwise in tags or func.overloadpacket in UNTAGGED)


def pointwise(call: Call, flow: LabelFlow) -> None:
    """Tie the operands' labels elementwise; freeze what meets values without channels."""
    result = call.result
    if not isinstance(result, Tensor):
        flow.freeze_all(call.tensors(), f"{call.func} returns several tensors and has no channel rule")
        return
    operands = call.tensors()
    lifted = [lift(flow.layers(operand), result.ndim) for operand in operands]
    if not any(lifted):
        flow.put(result, ())
        return
    lifted = _avoid_bare_values(operands, lifted, call, flow)
    flow.put(result, [_merge(cluster, call, flow) for cluster in _clusters(lifted)])


@rule(aten.log_sigmoid_forward)
def with_scratch(call: Call, flow: LabelFlow) -> None:
    """An element-wise function of the first tensor; other operands and results are scratch memory."""
    zero = call.func.overloadpacket is not aten.log_sigmoid_forward
    result, *scratch = [call.result] if isinstance(call.result, Tensor) else call.result
    layers = flow.layers(call.args[0])
    flow.put(result, [Layer(each.ids, each.zero & zero, (each,), free=each.free) for each in layers])
    for tensor in scratch:
        flow.put(tensor, ())


@rule(aten.bucketize, aten.searchsorted, aten.isin)
def looked_up(call: Call, flow: LabelFlow) -> None:
    """An index in a table, or whether the number is in it, for each number; it need not be 0 for 0."""
    place = 1 if call.func.overloadpacket is aten.searchsorted else 0
    numbers, table = call.args[place], call.args[1 - place]
    if not isinstance(numbers, Tensor) or not isinstance(table, Tensor) or table.ndim != 1:
        flow.freeze_all(call.tensors(), "they are looked up in a table of their own")
        flow.put(call.result, ())
        return
    flow.freeze_all([table], "other numbers are looked up among them")
    layers = flow.layers(numbers)
    flow.put(call.result, [Layer(each.ids, torch.zeros_like(each.zero), (each,)) for each in layers])


def put_sum(product: list[Layer], added: Tensor | None, call: Call, flow: LabelFlow) -> None:
    """Say which labels the result of ``call`` carries: those of a product that something is added to."""
    if added is None:
        flow.put(call.result, product)
        return
    alone = call.result.new_empty(()).expand(call.result.shape)
    flow.put(alone, product)
    pointwise(Call(aten.add.Tensor, (added, alone), {}, call.result), flow)


def lift(layers: tuple[Layer, ...], ndim: int) -> tuple[Layer, ...]:
    """Prepend axes of size 1, as broadcasting does."""

    def widened(layer: Layer) -> Layer:
        shape = (1,) * (ndim - layer.ids.ndim) + tuple(layer.ids.shape)
        return Layer(layer.ids.reshape(shape), layer.zero.reshape(shape), (layer,), free=layer.free)

    return tuple(widened(layer) for layer in layers)


def _avoid_bare_values(
    operands: list[Tensor], lifted: list[tuple[Layer, ...]], call: Call, flow: LabelFlow
) -> list[list[Layer]]:
    """Forbid dropping along an axis on which another operand has values but no labels."""
    ndim = call.result.ndim
    sizes = [(1,) * (ndim - operand.ndim) + tuple(operand.shape) for operand in operands]

    def bare(covered: list[frozenset[int]]) -> frozenset[int]:
        wide = [{axis for axis in range(ndim) if size[axis] > 1} for size in sizes]
        return frozenset[int]().union(*(axes - cover for axes, cover in zip(wide, covered, strict=True)))

    why = f"{call.func.overloadpacket.__name__} joins these channels with values that have none"
    return meeting(lifted, bare, why, flow)


def meeting(
    operands: Iterable[Iterable[Layer]],
    bare: Callable[[list[frozenset[int]]], frozenset[int]],
    why: str,
    flow: LabelFlow,
) -> list[list[Layer]]:
    """The layers of operands whose elements meet, without dropping along axes on which one has no labels.

    If channels of heads meet values that all heads share, the channels inside a head stay, but whole heads,
    the outer axis, can go. If heads cannot, channels inside them can, of all heads alike (`choices`).

    Args:
        operands: the layers of each operand.
        bare: the axes along which nothing can be dropped, given the axes that each operand has layers on.
        why: the reason for channels that stay.
        flow: the labels.
    """
    kept = [list(layers) for layers in operands]
    while True:
        blocked = bare([frozenset[int]().union(*(layer.support for layer in layers)) for layers in kept])
        single = frozenset[int]().union(
            *(layer.support for layers in kept for layer in layers if len(layer.support) == 1)
        )
        stops = [[blocked | _given_up(layer, blocked, single, flow) for layer in layers] for layers in kept]
        pairs = [list(zip(layers, stop, strict=True)) for layers, stop in zip(kept, stops, strict=True)]
        if not any(layer.support & stop for pair in pairs for layer, stop in pair):
            return kept
        fewer = [[flow.without(layer, stop, why, BARE_REMEDY) for layer, stop in pair] for pair in pairs]
        kept = [[layer for layer in layers if layer is not None] for layers in fewer]


def _given_up(
    layer: Layer, blocked: frozenset[int], single: frozenset[int], flow: LabelFlow
) -> frozenset[int]:
    """The axes of a layer along which it gives way to layers that lie along a ``single`` axis.

    None if nothing can be dropped along its outermost axis, or if it meets none of those. Layers that meet
    its outermost axis only, such as a scale for each head, give way to it if that axis is not followed.
    """
    outer = min(layer.support, default=0)
    shared = (layer.support - {outer}) & single
    if outer in blocked or len(layer.support) < 2 or not layer.support & single:
        return frozenset()
    inner = flow.takes_inner(layer.ids)
    if not shared:
        return frozenset({outer}) if inner else frozenset()
    return layer.support - {max(shared)} if inner else shared


Member = tuple[int, Layer]


def _clusters(lifted: list[list[Layer]]) -> list[list[Member]]:
    """Collect layers, with the number of their operand, whose axes overlap."""
    clusters: list[list[Member]] = []
    for operand, layers in enumerate(lifted):
        for layer in layers:
            touching = [c for c in clusters if any(layer.support & other.support for _, other in c)]
            merged = [member for cluster in touching for member in cluster] + [(operand, layer)]
            clusters = [c for c in clusters if c not in touching] + [merged]
    return clusters


def _merge(cluster: list[Member], call: Call, flow: LabelFlow) -> Layer:
    """Tie the layers of a cluster and say where the result is 0."""
    shape = torch.broadcast_shapes(*(layer.ids.shape for _, layer in cluster))
    if call.result in flow.stored:
        # Of a weight and its scale, the weight is to be masked and ranked.
        sizes = [operand.numel() for operand in call.tensors()]
        cluster = sorted(cluster, key=lambda member: -sizes[member[0]])
    for _, layer in cluster[1:]:
        flow.tie(cluster[0][1].ids, layer.ids)
    widest = max((layer for _, layer in cluster), key=lambda layer: len(layer.support))
    sources = [layer.needs[0] for _, layer in cluster]
    operands = [operand for operand, _ in cluster]
    flags = [layer.zero.expand(shape) for _, layer in cluster]
    flagged = frozenset(operand for operand, flag in zip(operands, flags, strict=True) if bool(flag.any()))
    zero, needed = _zero_of(call, operands, flags, flagged, flow.varies)
    if flagged and not bool(zero.all()) and breaks_at_zero(call, flagged):
        why = f"{call.func.overloadpacket.__name__} of 0 is no finite number"
        for _, layer in cluster:
            flow.freeze(layer.ids, why, BREAKS_REMEDY)
    elif flagged and bends_at_zero(call, flagged):
        # Masks belong behind it: no channel may be 0 here while the model trains.
        zero = torch.zeros_like(zero)
        why = (
            f"{call.func.overloadpacket.__name__} has no finite gradient where a mask makes these channels 0"
        )
        for operand, layer in cluster:
            if operand in flagged:
                flow.keep_unmasked(layer, why, BREAKS_REMEDY)
    free = all(layer.free for _, layer in cluster)
    needs = tuple(sources[index] for index in needed)
    if bool(zero.any()) and flow.stays_unmasked(needs):
        zero = torch.zeros_like(zero)
    return Layer(widest.ids.expand(shape), zero, needs, free=free)


def _zero_of(
    call: Call, operands: list[int], flags: list[Tensor], flagged: frozenset[int], varies: bool
) -> tuple[Tensor, tuple[int, ...]]:
    """Where the result is 0 for dropped channels, and the smallest set of operands that suffices for it.

    Each set is also tried together with all ``flagged`` operands, which may be 0 at the same time: 0 / 0 is
    not 0.
    """
    zero = torch.zeros_like(flags[0])
    best: tuple[int, ...] = tuple(range(len(operands)))
    found = False
    for taken in range(1, len(operands) + 1):
        for chosen in combinations(range(len(operands)), taken):
            zeros = frozenset(operands[index] for index in chosen)
            if not vanishes(call, zeros, varies) or not vanishes(call, zeros | flagged, varies):
                continue
            here = torch.stack([flags[index] for index in chosen]).all(dim=0)
            zero = zero | here
            if bool(here.all()) and not found:
                best, found = chosen, True
    return zero, best


def breaks_at_zero(call: Call, zeros: frozenset[int]) -> bool:
    """Whether finite numbers become infinite or NaN when these operands are 0, as in a logarithm or 0 / 0.

    A mask on the weights that read such values cannot make the product 0.
    """
    return _found(_breaks, call, zeros)


def _breaks(call: Call, zeros: frozenset[int]) -> bool:
    return not bool(_probed(call, zeros, 0.1).isfinite().all()) and bool(
        _probed(call, frozenset(), 0.1).isfinite().all()
    )


def bends_at_zero(call: Call, zeros: frozenset[int]) -> bool:
    """Whether the gradient is not finite when these operands are 0, but elsewhere is, as that of a root.

    Gradients need a thread of their own: below a dispatch mode, autograd is passed over.
    """
    return _found(_bends, call, zeros)


def _bends(call: Call, zeros: frozenset[int]) -> bool:
    def bends() -> bool:
        return _has_gradient(call, zeros, 1.0) and not _has_gradient(call, zeros, 0.0)

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(bends).result()


def _has_gradient(call: Call, among: frozenset[int], scale: float) -> bool:
    """Whether the gradients by these operands, which are small numbers times ``scale``, are finite."""
    leaves: list[Tensor] = []

    def probe(operand: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.bool:
            return torch.arange(16) % (2 + operand) == 0
        made = (torch.linspace(0.1, 0.9, 16) * (scale if operand in among else 1.0)).to(dtype)
        if operand in among and made.is_floating_point():
            leaves.append(made.requires_grad_())
        return made

    args, kwargs = _with_probes(call, probe)
    result = out_of_place(call.func)(*args, **kwargs)
    if not leaves or not result.requires_grad:
        return True
    gradients = torch.autograd.grad(result.sum(), leaves, materialize_grads=True)
    return all(bool(each.isfinite().all()) for each in gradients)


def vanishes(call: Call, zeros: frozenset[int], varies: bool) -> bool:
    """Whether the operation gives 0 when these operands (by number) are 0, whatever the others are.

    Args:
        call: the operation.
        zeros: the operands.
        varies: whether numbers among its arguments may be others at the next call.
    """
    calls = [call, *(_with_numbers(call, number) for number in OTHER_NUMBERS if varies)]
    return all(_found(_vanishes, each, zeros) for each in calls)


def _vanishes(call: Call, zeros: frozenset[int]) -> bool:
    return bool((_probed(call, zeros, -2.9, 3.1) == 0).all())


def _found(asked: Callable[[Call, frozenset[int]], bool], call: Call, zeros: frozenset[int]) -> bool:
    """What trying an operation on small numbers shows, once for each kind of call; False if that fails."""
    told = repr(tree_map_only(Tensor, lambda leaf: leaf.dtype, (call.args, call.kwargs)))
    key = (asked, call.func, zeros, told)
    if key not in _FOUND:
        _FOUND[key] = False
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            _FOUND[key] = asked(call, zeros)
    return _FOUND[key]


_FOUND: dict[tuple[object, ...], bool] = {}
"""The answers by what they are about: operations, the types of their operands, and their numbers."""


def _with_numbers(call: Call, number: float) -> Call:
    """The call with another number in the place of each number among its arguments."""

    def changed(leaf: Any) -> Any:
        return type(leaf)(number) if type(leaf) in (int, float) else leaf

    args, kwargs = tree_map(changed, (call.args, call.kwargs))
    return Call(call.func, args, kwargs, call.result)


def _probed(call: Call, zeros: frozenset[int], least: float, most: float = 0.9) -> Tensor:
    """The result of the operation for 0 in the operands ``zeros``, and values from a range in the others.

    A negative number times a mask of 0 is -0.0, so 0.0 and -0.0 are tried in all combinations, for up to four
    operands.
    """
    order = sorted(zeros)

    def probe(operand: int, dtype: torch.dtype) -> Tensor:
        if operand in zeros:
            negative = torch.arange(16) >> order.index(operand) & 1
            return (negative * -0.0).to(dtype)
        if dtype == torch.bool:
            return torch.arange(16) % (2 + operand) == 0
        return (torch.linspace(least, most, 16) * (1 + operand)).to(dtype)

    args, kwargs = _with_probes(call, probe)
    return call.func(*args, **kwargs)


def _with_probes(call: Call, probe: Callable[[int, torch.dtype], Tensor]) -> tuple[Any, Any]:
    """The arguments of a call, with what ``probe`` makes for each operand, by its number and its type."""
    numbers = count()
    return tree_map_only(Tensor, lambda leaf: probe(next(numbers), leaf.dtype), (call.args, call.kwargs))
