"""The *stored* tensors of a run: parameters, buffers, and what is computed from these and constants only."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from pdp_fx.channels.labels import Slot
from pdp_fx.channels.record import Call
from pdp_fx.tracing.structure import flat_tensors

aten = torch.ops.aten


class Stored:
    """The stored tensors of a run, and their names.

    A computed weight that stands for a parameter has the parameter's name.

    Args:
        gm: the graph module that runs.

    Attributes:
        parameters: names of all parameters.
        shapes: of these, of buffers, and of the constants that are labelled (`Slot`).
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.parameters = frozenset(name for name, _ in gm.named_parameters())
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._names: dict[int, str] = {}
        self._computed = WeakTensorKeyDictionary()
        self._constant = WeakTensorKeyDictionary()
        self._lost = WeakTensorKeyDictionary()
        self._standing: list[Tensor] = []
        strided = (pair for pair in gm.named_parameters() if pair[1].layout is torch.strided)
        self._places = {(tensor.data_ptr(), tensor.numel()): name for name, tensor in strided}
        for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]:
            self._names.setdefault(id(tensor), name)
            self.shapes[name] = tuple(tensor.shape)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._computed.get(tensor, id(tensor) in self._names))

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter or buffer; empty for any other tensor."""
        return self._names.get(id(tensor), "")

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from numbers only, in operations that have been followed."""
        return bool(self._constant.get(tensor))

    def follow(self, call: Call) -> None:
        """Note whether the results of an operation are computed from stored tensors only."""
        sources = call.tensors()
        written_out = call.func is aten.lift_fresh.default and sources[0] not in self._computed
        constant = written_out or all(map(self.is_constant, sources))
        stored = written_out or all(tensor in self for tensor in sources)
        lost = {slot: None for tensor in sources for slot in self.lost_by(tensor)} if stored else {}
        for tensor in flat_tensors(call.result):
            self._computed[tensor] = stored
            self._constant[tensor] = constant
            self._lost[tensor] = tuple(lost)

    def written(self, alias: Tensor, target: Tensor) -> None:
        """Note that ``target`` was written to, which shares memory with ``alias``."""
        if not self.name(alias):
            self._computed[alias] = alias in self and target in self
            self._constant[alias] = self.is_constant(alias) and self.is_constant(target)

    def let_stand(self, value: Tensor, parameter: str) -> None:
        """Let a computed weight stand for a parameter."""
        self._standing.append(value)
        self._names[id(value)] = parameter
        self._lost[value] = ()

    def lost_by(self, tensor: Tensor) -> tuple[Slot, ...]:
        """The parameter rows whose labels were lost on the way to a tensor."""
        return self._lost.get(tensor) or ()

    def lose(self, tensor: Tensor, slots: Sequence[Slot]) -> None:
        """Note that the labels of parameter rows were lost on the way to a stored tensor."""
        if tensor in self:
            rows = tuple(slot for slot in slots if slot.axis == 0 and slot.tensor in self.parameters)
            self._lost[tensor] = self.lost_by(tensor) + rows

    def shares(self, weight: Tensor, behind: Sequence[Sequence[Slot]]) -> Mapping[str, float]:
        """The parameters that a weight consists of, with how often each of their numbers is in it.

        Args:
            weight: a stored tensor.
            behind: for each of its label layers, the parameter axes that it comes from (`labels.origins`).
        """
        own = self.name(weight)
        if own:
            return {own: 1}
        named = ([slot.tensor for slot in slots if not slot.constant] for slots in behind)
        owners = [dict.fromkeys(names) for names in named if names]
        common = [name for name in owners[0] if all(name in others for others in owners)] if owners else []
        # Rows that are scaled to lengths of their own have their labels from these.
        names = (
            common or list(dict.fromkeys(name for each in owners for name in each)) or self._seen_as(weight)
        )
        sizes = {name: math.prod(self.shapes[name]) for name in names}
        if sum(sizes.values()) > weight.numel():
            largest = max(names, key=lambda name: sizes[name])
            sizes = {largest: sizes[largest]}
        return {name: weight.numel() / max(sum(sizes.values()), 1) for name in sizes}

    def _seen_as(self, weight: Tensor) -> list[str]:
        """The parameter that a tensor is all of; one of a single number has no labels to tell."""
        if weight.layout is not torch.strided:
            return []
        place = weight.data_ptr(), weight.numel()
        return [name for name in [self._places.get(place)] if name is not None]
