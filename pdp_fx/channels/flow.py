"""How labels flow through aten operations, and the registry of rules.

`LabelFlow` is a dispatch mode: it lets each operation compute its real result and then calls the operation's
rule, which says by the methods of `LabelFlow` what happens to the labels. The findings are in its `Record`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from pdp_fx.channels.aliases import OVERWRITTEN, Aliases, Write, follow, written_by
from pdp_fx.channels.grouping import concatenated
from pdp_fx.channels.in_place import out_of_place
from pdp_fx.channels.labels import Layer, Reason, Slot, is_between_others, origins, shaped
from pdp_fx.channels.record import (
    Call,
    Contraction,
    NormSite,
    Production,
    Record,
    Sized,
    StandIn,
    Use,
)
from pdp_fx.channels.stored import Stored
from pdp_fx.tracing.structure import flat_tensors, memory_of

aten = torch.ops.aten

Rule = Callable[[Call, "LabelFlow"], None]
"""Says what an operation that has run does to labels."""

APART = "give the function the axes themselves, not one axis that they were flattened to"
"""What to do if statistics run over one axis of a batch, channels and pixels."""

RULES: dict[torch._ops.OpOverloadPacket | str, Rule] = {}


def rule(*packets: torch._ops.OpOverloadPacket | str) -> Callable[[Rule], Rule]:
    """Register a channel rule for aten operations; a second rule for one operation is an error.

    Other libraries' operations are known by name, "library::operation", since they need not be installed.
    """

    def register(function: Rule) -> Rule:
        for packet in packets:
            if packet in RULES:
                raise ValueError(f"{packet} has a channel rule already")
            RULES[packet] = function
        return function

    return register


class LabelFlow(TorchDispatchMode):
    """Moves labels along with the tensors that carry them.

    Args:
        gm: the graph module; its parameters and buffers are labelled axis by axis.
        out_of_reach: parameters that no mask can be put on, with the reason as a relative clause.
        element_by_element: parameters that the model writes to so that masks do not matter.
        rules: finds the rule of an operation.
        inner: the nodes at which channels inside others are followed (`takes_inner`).

    Attributes:
        stored: the parameters and buffers, and tensors that are computed from them alone.
        record: the findings.
        node: the name of the graph node that is running.
        source: the line of the model's code that it comes from.
        sized: what this node has laid out by sizes or positions in its arguments.
        idle: the nodes that do nothing in eval mode, whose multiply-accumulates do not count.
        masks_norm: whether this node is a norm that can be given a mask.
        looked: whether this node has read a number out of a tensor.
        drew: whether this node has drawn random numbers.
        varies: whether this node is told a number that may be another at the next call.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        out_of_reach: Mapping[str, str],
        element_by_element: Collection[str],
        rules: Callable[[Call], Rule],
        inner: frozenset[str],
    ) -> None:
        super().__init__()
        self.stored = Stored(gm)
        self.record = Record(shapes=self.stored.shapes, inner=inner)
        self.node = "input"
        self.source = ""
        self.sized: list[Sized] = []
        self.idle: frozenset[str] = frozenset()
        self.masks_norm = False
        self.grouped_before: Mapping[tuple[str, str], bool] = {}
        self.looked = False
        self.drew = self.varies = False
        self._gapped: list[tuple[Tensor, Tensor]] = []
        self._rules = rules
        self._out_of_reach = out_of_reach
        self._element_by_element = element_by_element
        self._layers = WeakTensorKeyDictionary()
        self._aliases = Aliases()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        layout = (args[0].shape, _strides(args[0])) if func is aten.as_strided_.default else None
        viewed = self._view_instead(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if viewed is not None:
            self.put(result, self.layers(viewed))
            return result
        if layout is not None and layout == (result.shape, _strides(result)):
            return result
        self.looked = self.looked or func is aten._local_scalar_dense.default
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        call = Call(func, args, kwargs or {}, result)
        writes: list[Write] = []
        if func._schema.is_mutable:
            self._keep_gapped(call)
        if func._schema.is_mutable and not self.fills_with_zero(call):
            writes += self._aliases.writes(call, self._labelled)
            self._keep_written(call.args[0])
        self.stored.follow(call)
        self._rules(call)(call, self)
        for write in writes:
            self._follow_write(write, call)
        return result

    def _view_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The view that an operation which changes the axes of a tensor in place amounts to, with its labels.

        None for any other operation, or if there is no rule for such views.
        """
        if torch.Tag.inplace_view not in func.tags:
            return None
        plain = out_of_place(func)
        if plain is func or plain.overloadpacket not in RULES:
            return None
        view = plain(*args, **kwargs)
        call = Call(plain, args, kwargs, view)
        self.stored.follow(call)
        self._rules(call)(call, self)
        return view

    def note_gapped(self, view: Tensor, ids: Tensor) -> None:
        """Note a view with gaps between channels: once channels are removed, it has to be a copy."""
        self._gapped.append((view, ids))

    def _keep_gapped(self, call: Call) -> None:
        """Freeze the channels of a view with gaps if its memory is written to, which a copy would not see."""
        written = {memory_of(tensor)._cdata for tensor in written_by(call)} if self._gapped else ()
        for view, ids in self._gapped:
            if memory_of(view)._cdata in written:
                self.freeze(ids, *OVERWRITTEN)

    def _follow_write(self, write: Write, call: Call) -> None:
        """Update the labels of tensors that share memory with a tensor that was written to."""
        is_result = any(tensor is write.target for tensor in flat_tensors(call.result))
        for alias in write.aliases:
            before = self._labelled(alias)
            settled = self.stored.name(alias) in self._element_by_element
            of_weights = alias in self.stored and any(origins(layer) for layer in before)
            if is_result and (settled or not of_weights):
                followed, stays = follow(write, alias, before, self._labelled(write.target))
            else:
                known = [*write.sources, write.target, alias]
                followed, stays = [], [layer.ids for tensor in known for layer in self._labelled(tensor)]
            for each in followed:
                self.tie(each.part.ids, each.now.ids)
            self.put(alias, [each.layer if settled else each.result() for each in followed])
            self.stored.written(alias, write.target)
            if stays:
                self._aliases.lose(alias, stays, self._reason(*OVERWRITTEN))
                self.stored.lose(alias, [slot for layer in before for slot in origins(layer)])

    def _keep_written(self, written: Any) -> None:
        """Freeze the channels of a parameter that is written to in eval mode: their ranks would change."""
        name = self.stored.name(written) if isinstance(written, Tensor) else ""
        if name in self.stored.parameters and name not in self._element_by_element:
            self.freeze_all([written], "the model writes to this parameter in eval mode, too")

    def stand_in(self, value: Tensor, by: StandIn) -> bool:
        """Let a computed weight stand for a parameter if necessary; returns whether it does.

        That is necessary if no parameter behind the weight can be pruned in its place, if labels of rows or
        columns were lost on the way to it, or if they must stay because of how it is computed. The channels
        of the parameters that it is computed from are then frozen.
        """
        if not by.needed and self._is_free(value):
            return False
        slots = [Slot(name, axis) for name in by.sources for axis in range(len(self.record.shapes[name]))]
        for slot in slots:
            if slot in self.record.slots:
                self.freeze(
                    self.record.slots[slot], "convert writes down the weight that is computed from it"
                )
        # What was asked of the parameters is not asked of the weight that has their name from here on.
        asked, behind = self.record.demands, frozenset(slots)
        self.record.demands = [layer for layer in asked if behind.isdisjoint(origins(layer))]
        self.stored.let_stand(value, by.parameter)
        self._know(value, self._label_stored(by.parameter, value))
        self.record.stand_ins[by.parameter] = by
        return True

    def _is_free(self, weight: Tensor) -> bool:
        """Whether the rows and columns of a computed weight can be removed by removing those behind them."""
        layers = self.layers(weight)
        through = {axis for layer in layers if layer.all_zero for axis in layer.support}
        if self.stored.lost_by(weight) or any(
            size > 1 and axis not in through for axis, size in enumerate(weight.shape[:2])
        ):
            return False
        mine = np.concatenate([layer.ids.reshape(-1).numpy() for layer in layers] or [np.arange(0)])
        return not any(np.isin(mine, ids).any() for ids, _ in self.record.ties.frozen)

    def layers(self, tensor: Tensor) -> tuple[Layer, ...]:
        """The label layers of ``tensor``; a dense parameter or buffer gets its own on first sight."""
        for ids, reason in self._aliases.lost(tensor):
            for each in ids:
                self.record.ties.freeze(each, reason)
        return self._labelled(tensor)

    def _labelled(self, tensor: Tensor) -> tuple[Layer, ...]:
        found = self._layers.get(tensor)
        if found is None:
            name = self.stored.name(tensor)
            found = self._label_stored(name, tensor) if name and tensor.layout is torch.strided else ()
            self._know(tensor, found)
        return found

    def _know(self, tensor: Tensor, layers: tuple[Layer, ...]) -> None:
        if tensor not in self._layers:
            self._aliases.add(tensor)
        self._layers[tensor] = layers

    def label_constant(self, node: str, tensor: Tensor) -> None:
        """Label the axes of a constant that have no labels yet, so that it can lose what it meets.

        Args:
            node: the name of the node that makes it, alike at every call.
            tensor: the constant; nothing happens if it is none, or shares its memory with others.
        """
        if not self.stored.is_constant(tensor) or self._aliases.shared(tensor):
            return
        layers = self.layers(tensor)
        known = frozenset[int]().union(*(layer.support for layer in layers))
        self.stored.shapes[f"%{node}"] = tuple(tensor.shape)
        self.put(tensor, (*layers, *self._label_stored(f"%{node}", tensor, known)))

    def _label_stored(
        self, name: str, tensor: Tensor, known: frozenset[int] = frozenset()
    ) -> tuple[Layer, ...]:
        layers: list[Layer] = []
        for axis, size in enumerate(tensor.shape):
            if size > 1 and axis not in known:
                slot = Slot(name, axis)
                self.record.slots[slot] = self.record.ties.fresh(size)
                ids = shaped(self.record.slots[slot], axis, tensor.ndim)
                masked = name in self.stored.parameters and name not in self._out_of_reach
                layers.append(Layer(ids, torch.full_like(ids, masked, dtype=torch.bool), (), slot))
        return tuple(layers)

    def put(self, tensor: Tensor, layers: list[Layer] | tuple[Layer, ...]) -> None:
        """Say which labels ``tensor`` carries; layers that change along no axis say nothing."""
        changing = tuple(layer for layer in layers if layer.support)
        self._know(tensor, changing)
        self.record.grids += [layer.ids for layer in changing if len(layer.support) > 1]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Tie labels whose elements meet in the operation; operands are broadcast (`Ties.tie`)."""
        self.record.ties.tie(left, right)

    def classes(self, ids: Tensor) -> np.ndarray:
        """The classes of labels by the ties so far."""
        return self.record.ties.classes()[ids.numpy()]

    def bind(self, left: Tensor, right: Tensor) -> None:
        """Tie labels that must be kept or dropped together without having met (`Ties.bind`)."""
        self.record.ties.bind(left, right)

    def freeze(self, ids: Tensor, why: str, remedy: str = "") -> None:
        """Say that these labels must stay, because of the node that is running."""
        self.record.ties.freeze(ids, self._reason(why, remedy))

    def keep_unmasked(self, layer: Layer, why: str, remedy: str = "") -> None:
        """Say that no mask may make this layer's elements 0 here; where one must, the channels stay."""
        self.record.unmasked.append((frozenset(origins(layer)), layer.ids, self._reason(why, remedy)))

    def stays_unmasked(self, layers: Iterable[Layer]) -> bool:
        """Whether a mask that makes these layers 0 would make others 0 that must not be, as far as known."""
        behind = frozenset(origins(*layers)) if self.record.unmasked else frozenset[Slot]()
        return any(behind & slots for slots, _, _ in self.record.unmasked)

    def _reason(self, why: str, remedy: str = "") -> Reason:
        return Reason(self.node, self.source, why, remedy)

    def freeze_all(self, tensors: list[Tensor], why: str, remedy: str = "") -> None:
        """Freeze every label of these tensors."""
        for tensor in tensors:
            for layer in self.layers(tensor):
                self.freeze(layer.ids, why, remedy)

    def unmasked(self, *layers: Layer) -> str:
        """Which parameter behind the layers no mask can be put on, and why, or the empty string."""
        behind = (slot.tensor for layer in layers for slot in origins(layer))
        name = next((name for name in behind if name in self._out_of_reach), None)
        return "" if name is None else f"no mask can be put on {name}, {self._out_of_reach[name]}"

    def counted(self, ids: Tensor, axis: int, why: str) -> None:
        """Say that the number of these labels along ``axis`` must not change."""
        self.record.counted.append((ids, axis, Reason(self.node, self.source, why)))

    def without(self, layer: Layer, blocked: frozenset[int], why: str, remedy: str = "") -> Layer | None:
        """Forbid to drop indices along the ``blocked`` axes, and return what is left of the layer.

        The labels along a blocked axis are tied, so that only whole slices across it can be dropped; the
        returned layer no longer changes along that axis. If the layer lies along blocked axes only, it is
        frozen, and None is returned.
        """
        if layer.support and layer.support <= blocked:
            self.freeze(layer.ids, why, remedy)
            return None
        for axis in sorted(layer.support & blocked):
            first = layer.ids.narrow(axis, 0, 1)
            self.bind(layer.ids, first)
            layer = Layer(first, layer.zero.all(dim=axis, keepdim=True), (layer,), free=layer.free)
        return layer

    def takes_inner(self, outer: Tensor) -> bool:
        """Whether channels inside those of ``outer``, such as those inside heads, are followed at this node.

        Otherwise those of ``outer`` are (`choices`).
        """
        self.record.choices.append((self.node, outer.reshape(-1).numpy()))
        return self.node in self.record.inner

    def all_without(self, layers: Iterable[Layer], blocked: frozenset[int], why: str) -> list[Layer]:
        """`without` for several layers; frozen ones are left out."""
        kept = (self.without(layer, blocked, why) for layer in layers)
        return [layer for layer in kept if layer is not None]

    def normalise(self, layer: Layer, axis: int, why: str, gated: bool) -> bool:
        """Note that statistics run over this layer's channels; freeze them if the node can take no mask.

        A mask lies along the axis as on the example inputs. If a batch and pixels were flattened to one axis
        with the channels, others may lie otherwise along an axis of the same length.

        Args:
            layer: the channels.
            axis: the axis that the statistics run over.
            why: the reason for freezing.
            gated: whether a residual stream may pass only if the spec says so.

        Returns:
            Whether the node will be given a mask.
        """
        elsewhere = any(site.axis != axis for site in self.norms_here())
        ids = layer.ids.reshape(-1)
        if is_between_others(ids):
            self.freeze(ids, f"{why}, and what lies before and behind them is on the same axis", APART)
            return False
        if axis == 0 and len(ids.unique()) < len(ids):
            self.freeze(ids, f"{why}, and others, such as a batch, are on the same axis", APART)
            return False
        if self.masks_norm and layer.support == frozenset({axis}) and not elsewhere:
            self.record.norms.append(NormSite(self.node, axis, layer.ids.ndim, ids, gated, self.source, why))
            return True
        self.freeze(layer.ids, why)
        return False

    def norms_here(self) -> Iterator[NormSite]:
        """The statistics over channels of the node that is running."""
        return itertools.takewhile(lambda site: site.node == self.node, reversed(self.record.norms))

    def lose_rows(self, call: Call) -> None:
        """Note the parameter rows whose labels end at this operation; they stay if its result is a weight."""
        slots = [s for tensor in call.tensors() for layer in self.layers(tensor) for s in origins(layer)]
        for tensor in flat_tensors(call.result):
            self.stored.lose(tensor, slots)

    def demand(self, layer: Layer) -> None:
        """Say that this layer's elements must be 0 when their channel is dropped."""
        self.record.demands.append(layer)

    def produce(self, layer: Layer, weight: Tensor, data: Tensor) -> None:
        """Say that this axis of a weight produces new channels, by a product with ``data``."""
        if weight not in self.stored:
            return
        behind, inner = origins(layer), data in self.stored
        made_by = [slot for slot in behind if slot.tensor in self.stored.parameters]
        if behind and not made_by:
            made_by = [slot for slot in behind if not slot.constant]
            kind = "buffer" if made_by else "constant"
            self.freeze(
                layer.ids, f"{behind[0].tensor} is a {kind}, which is not trained", "make it a parameter"
            )
        self.record.producers += [Production(slot, layer.ids.reshape(-1), inner) for slot in made_by]

    def is_depthwise(self, weight: Tensor, groups: int, channels: int) -> bool:
        """Whether each channel is a group of its own, or was one before channels were removed.

        Of a depthwise convolution a single group may be left, and of other groups a single channel each.
        """
        use = (self.node, self.stored.name(weight))
        self.record.grouped[use] = self.grouped_before.get(use, 1 < groups == channels)
        return self.record.grouped[use]

    def is_zero(self, number: Any) -> bool:
        """Whether a number is 0 at every call, and not only at this one."""
        return isinstance(number, int | float) and number == 0 and not self.varies

    def fills_with_zero(self, call: Call) -> bool:
        """Whether a call writes zeros, which keeps every element that is 0 with its channel at 0."""
        fills = call.func is aten.fill_.Scalar and self.is_zero(call.args[1])
        return fills or call.func.overloadpacket is aten.zero_

    def contract(
        self,
        weight: Tensor,
        data: Tensor,
        positions: float,
        inputs: Tensor | None,
        across: Iterable[Layer] = (),
    ) -> None:
        """Count the multiply-accumulates of a contraction of ``data`` with a stored weight.

        What is computed of weights alone is computed once, and not for every example. Data that is made of
        numbers, such as the first state of a recurrent layer, is made for every example.

        Args:
            weight: the weight; nothing is counted if it is no stored one.
            data: what it is multiplied with.
            positions: how often each number of it is used.
            inputs: the labels of the input channels.
            across: the layers along other axes of the data, for each element of which it is used anew.
        """
        if weight not in self.stored:
            return
        of_data = data not in self.stored
        lost = [Production(slot, self.record.slots[slot], False) for slot in self.stored.lost_by(weight)]
        self.record.producers += lost
        behind = [origins(layer) for layer in self.layers(weight)]
        if of_data:
            self.record.weighing.update(slot for slots in behind for slot in slots)
        axes = (layer.ids.reshape(-1).numpy() for layer in across if not layer.free)
        anew = tuple(ids for ids in axes if ids.size)
        counts = (of_data or self.stored.is_constant(data)) and self.node not in self.idle
        if counts:
            each = positions / math.prod(ids.size for ids in anew)
            self.record.uses.append(Use((*self._axes(weight), *anew), each))
        shares = self.stored.shares(weight, [*behind, *([made.slot] for made in lost)])
        parts = {name: self._part(name, weight) for name, share in shares.items() if share < 1}
        if sum(math.prod(map(len, part)) for part in parts.values()) != weight.numel():
            parts = {}
        for name, share in shares.items():
            part = parts.get(name, ())
            used = (positions if part else positions * share) if counts else 0.0
            self.record.contractions.append(Contraction(name, used, self.node, inputs, anew, part))

    def _part(self, name: str, weight: Tensor) -> tuple[np.ndarray, ...]:
        """The indices along each axis of a parameter whose labels a weight has; all where it has none."""
        ids = concatenated(layer.ids.reshape(-1).numpy() for layer in self.layers(weight))
        part: list[np.ndarray] = []
        for axis, size in enumerate(self.stored.shapes[name]):
            own = self.record.slots.get(Slot(name, axis))
            found = np.arange(0) if own is None else np.flatnonzero(np.isin(own.numpy(), ids))
            part.append(found if found.size else np.arange(size))
        return tuple(part)

    def _axes(self, weight: Tensor) -> tuple[np.ndarray | int, ...]:
        """The labels of each axis of a weight, or its length if it has none of its own."""
        found: list[np.ndarray | int] = list(weight.shape)
        for layer in self.layers(weight):
            if len(layer.support) == 1 and not layer.free:
                found[min(layer.support)] = layer.ids.reshape(-1).numpy()
        return tuple(found)


def _strides(tensor: Tensor) -> list[int]:
    """The strides that matter: those of axes with several indices."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
