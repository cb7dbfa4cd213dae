"""Running a traced graph while labels flow through every aten operation.

`LabelFlow` is a dispatch mode: it lets each operation compute its real result and then asks the
operation's rule what became of the labels. `run` drives the graph through it node by node, in
eval mode and without gradients, so that every label knows the node that it met.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pdp_fx.channels.labels import Layer, Reason, Slot, Ties, shaped
from pdp_fx.tracing.steps import DIFFERS_BY_MODE

aten = torch.ops.aten


@dataclass(frozen=True)
class Contraction:
    """A conv, linear or matmul with a parameter as its weight.

    Attributes:
        weight: the parameter's qualified name.
        positions: how often each weight is used, summed over the batch.
        node: the graph node that does it.
        inputs: the labels of the input channels, or None when they have none.
    """

    weight: str
    positions: int
    node: str
    inputs: Tensor | None


@dataclass(frozen=True)
class NormSite:
    """A node whose statistics run over channels, and which can be given a mask of them.

    Attributes:
        node: the graph node.
        axis: the axis of its input that the channels lie along.
        ids: the labels along that axis.
    """

    node: str
    axis: int
    ids: Tensor


@dataclass(frozen=True)
class Call:
    """One aten operation that has just run."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def tensors(self) -> list[Tensor]:
        """All tensor arguments, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True)
class Sized:
    """Labels that an operation has laid out by sizes it was given: where they were, where they are."""

    before: Layer
    after: Layer


Rule = Callable[[Call, "LabelFlow"], None]
RULES: dict[torch._ops.OpOverloadPacket, Rule] = {}


def rule(*packets: torch._ops.OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Register a channel rule for aten operations; a second rule for one operation is an error."""

    def register(function: Rule) -> Rule:
        for packet in packets:
            if packet in RULES:
                raise ValueError(f"{packet} has a channel rule already")
            RULES[packet] = function
        return function

    return register


Tainted = tuple[int | None, int, Tensor]
"""A number that depends on how many channels there are: its place in a shape, and the axis of labels."""


@dataclass(frozen=True)
class Labelled:
    """The shape of a tensor and the labels it carries."""

    shape: tuple[int, ...]
    layers: tuple[Layer, ...]


@dataclass
class Record:
    """What one run of the graph has shown.

    Attributes:
        ties: all labels and their ties.
        slots: the labels of every parameter and buffer axis that was read.
        shapes: the shape of every parameter and buffer.
        producers: weight axes that make new channels.
        contractions: uses of weights.
        demands: layers that must be 0 where their channel is dropped.
        grids: labels that lie along several axes.
        norms: nodes that normalise over channels, to be given masks.
        parts: labels of parts that are cut out of channels; none may become empty.
        counted: labels whose number along an axis must not change, with the reason.
        values: the tensors that each node gave, in order.
        numbers: the numbers that nodes gave.
        resized: nodes whose sizes have to be written anew when channels go.
        taint: for every number node, which labels its value counts.
    """

    ties: Ties = field(default_factory=Ties)
    slots: dict[Slot, Tensor] = field(default_factory=dict[Slot, Tensor])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    producers: list[Slot] = field(default_factory=list[Slot])
    contractions: list[Contraction] = field(default_factory=list[Contraction])
    demands: list[Layer] = field(default_factory=list[Layer])
    grids: list[Tensor] = field(default_factory=list[Tensor])
    norms: list[NormSite] = field(default_factory=list[NormSite])
    parts: list[Tensor] = field(default_factory=list[Tensor])
    counted: list[tuple[Tensor, int, Reason]] = field(default_factory=list[tuple[Tensor, int, Reason]])
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    values: dict[str, tuple[Labelled, ...]] = field(default_factory=dict[str, "tuple[Labelled, ...]"])
    resized: list[str] = field(default_factory=list[str])
    taint: dict[str, list[Tainted]] = field(default_factory=dict[str, "list[Tainted]"])


class LabelFlow(TorchDispatchMode):
    """Moves labels along with the tensors that carry them.

    Args:
        gm: the graph module; its parameters and buffers are labelled axis by axis.
        maskable: names of the parameters that a mask can be put on.
        rules: finds the rule of an operation.
        through_norms: whether channels that LayerNorm, RMSNorm or a mean runs over may go.
    """

    def __init__(
        self, gm: fx.GraphModule, maskable: frozenset[str], rules: Callable[[Call], Rule], through_norms: bool
    ) -> None:
        super().__init__()
        self.through_norms = through_norms
        self.norm_remedy = "" if through_norms else "Channels(through_norms=True) gives it masked statistics"
        self.record = Record()
        self.node = "input"
        self.source = ""
        self.sized: list[Sized] = []
        self.masks_norm = False
        self._rules = rules
        self._maskable = maskable
        self._layers = WeakTensorKeyDictionary()
        self._names: dict[int, str] = {}
        for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]:
            self._names.setdefault(id(tensor), name)
            self.record.shapes[name] = tuple(tensor.shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        layout = (args[0].shape, _strides(args[0])) if func is aten.as_strided_.default else None
        result = func(*args, **(kwargs or {}))
        if layout is not None and layout == (result.shape, _strides(result)):
            return result
        call = Call(func, args, kwargs or {}, result)
        if func._schema.is_mutable and not _fills_with_zero(call):
            self._freeze_aliases(call)
        self._rules(call)(call, self)
        return result

    def _freeze_aliases(self, call: Call) -> None:
        """Freeze what shares memory with a tensor that is written to: its labels can not be followed."""
        for leaf, argument in zip(call.args, call.func._schema.arguments, strict=False):
            if (
                not isinstance(leaf, Tensor)
                or argument.alias_info is None
                or not argument.alias_info.is_write
            ):
                continue
            storage = leaf.untyped_storage()._cdata
            aliases = [t for t in self._layers if t is not leaf and t.untyped_storage()._cdata == storage]
            if aliases:
                why = "it is written to in place through a view"
                self.freeze_all(
                    [leaf, *aliases, *call.tensors()],
                    why,
                    "make a new tensor instead, with torch.cat or torch.where",
                )

    def layers(self, tensor: Tensor) -> tuple[Layer, ...]:
        """The label layers of ``tensor``; a parameter or buffer gets its own on first sight."""
        found = self._layers.get(tensor)
        if found is None:
            name = self._names.get(id(tensor))
            found = () if name is None else self._label_stored(name, tensor)
            self._layers[tensor] = found
        return found

    def _label_stored(self, name: str, tensor: Tensor) -> tuple[Layer, ...]:
        layers: list[Layer] = []
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                slot = Slot(name, axis)
                self.record.slots[slot] = self.record.ties.fresh(size)
                ids = shaped(self.record.slots[slot], axis, tensor.ndim)
                layers.append(
                    Layer(ids, torch.full_like(ids, name in self._maskable, dtype=torch.bool), (), slot)
                )
        return tuple(layers)

    def put(self, tensor: Tensor, layers: list[Layer] | tuple[Layer, ...]) -> None:
        """Say which labels ``tensor`` carries; layers that change along no axis say nothing."""
        self._layers[tensor] = tuple(layer for layer in layers if layer.support)
        self.record.grids += [layer.ids for layer in self._layers[tensor] if len(layer.support) > 1]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Tie labels that the operation brings together element by element, broadcasting."""
        self.record.ties.tie(left, right)

    def bind(self, left: Tensor, right: Tensor) -> None:
        """Tie labels that only have to be kept or dropped together, broadcasting."""
        self.record.ties.bind(left, right)

    def freeze(self, ids: Tensor, why: str, remedy: str = "") -> None:
        """Say that these labels must stay, because of the node that is running."""
        self.record.ties.freeze(ids, Reason(self.node, self.source, why, remedy))

    def freeze_all(self, tensors: list[Tensor], why: str, remedy: str = "") -> None:
        """Freeze every label of these tensors."""
        for tensor in tensors:
            for layer in self.layers(tensor):
                self.freeze(layer.ids, why, remedy)

    def counted(self, ids: Tensor, axis: int, why: str) -> None:
        """Say that the number of these labels along ``axis`` must not change."""
        self.record.counted.append((ids, axis, Reason(self.node, self.source, why)))

    def without(self, layer: Layer, blocked: frozenset[int], why: str, remedy: str = "") -> Layer | None:
        """The layer with nothing to drop along the ``blocked`` axes.

        Along a blocked axis labels are tied, so that only whole slices across it can go; a layer
        that lies along blocked axes only is frozen, and None is returned.
        """
        if layer.support and layer.support <= blocked:
            self.freeze(layer.ids, why, remedy)
            return None
        for axis in sorted(layer.support & blocked):
            first = layer.ids.narrow(axis, 0, 1)
            self.bind(layer.ids, first)
            layer = Layer(first, layer.zero.all(dim=axis, keepdim=True), (layer,), free=layer.free)
        return layer

    def normalise(self, layer: Layer, axis: int, why: str) -> bool:
        """Note that statistics run over this layer's channels; freeze them where no mask can be given."""
        if self.masks_norm and layer.support == frozenset({axis}):
            self.record.norms.append(NormSite(self.node, axis, layer.ids.reshape(-1)))
            return True
        self.freeze(layer.ids, why, self.norm_remedy)
        return False

    def demand(self, layer: Layer) -> None:
        """Say that this layer's elements must be 0 when their channel is dropped."""
        self.record.demands.append(layer)

    def produce(self, layer: Layer) -> None:
        """Say that this weight axis makes new channels."""
        if layer.slot is not None and layer.slot not in self.record.producers:
            self.record.producers.append(layer.slot)

    def contract(self, weight: Tensor, positions: int, inputs: Tensor | None) -> None:
        """Count the multiply-accumulates of a contraction with a parameter."""
        owners = {layer.slot.tensor for layer in self.layers(weight) if layer.slot}
        name = self._names.get(id(weight)) or (owners.pop() if len(owners) == 1 else None)
        if name is not None:
            self.record.contractions.append(Contraction(name, positions, self.node, inputs))


def _fills_with_zero(call: Call) -> bool:
    """Whether zeros are written: what vanishes with its channel still does, through whatever view."""
    fills = call.func is aten.fill_.Scalar and call.args[1] == 0
    return fills or call.func.overloadpacket is aten.zero_


def _strides(tensor: Tensor) -> list[int]:
    """The strides that matter: those of axes with several indices."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


After = Callable[[fx.Node, LabelFlow, Any], None]


class _FlowInterpreter(fx.Interpreter):
    """Runs the graph and tells the flow which node is running."""

    def __init__(
        self, gm: fx.GraphModule, flow: LabelFlow, after: After, can_mask: Callable[[fx.Node], bool]
    ) -> None:
        super().__init__(gm)
        self.flow = flow
        self.after = after
        self.can_mask = can_mask

    def run_node(self, n: fx.Node) -> Any:
        self.flow.node = n.name
        self.flow.source = str(n.meta.get("source", ""))
        self.flow.sized = []
        self.flow.masks_norm = self.can_mask(n)
        result = self.run_unseen(n) if is_opaque(self.module, n) else super().run_node(n)
        self.after(n, self.flow, result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.flow.record.values[n.name] = tuple(
            Labelled(tuple(t.shape), self.flow.layers(t)) for t in tensors
        )
        return result

    def run_unseen(self, node: fx.Node) -> Any:
        """Run a module whose inside depends on its inputs: another input may take another way through it."""
        with no_dispatch():
            result = super().run_node(node)
        module = self.fetch_attr(str(node.target))
        read = [
            leaf for leaf in tree_leaves(self.fetch_args_kwargs_from_env(node)) if isinstance(leaf, Tensor)
        ]
        why = f"{type(module).__name__} decides by its data what it does"
        remedy = "choose with tensor operations such as torch.where"
        self.flow.freeze_all([*read, *module.parameters(), *module.buffers()], why, remedy)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in read):
                self.flow.put(leaf, ())
        return result


def is_opaque(gm: nn.Module, node: fx.Node) -> bool:
    """Whether ``node`` calls a user's module as a whole, because what it does depends on its inputs.

    A module that only acts differently in training mode always does the same in eval mode.
    """
    if node.op != "call_module" or node.meta.get("opaque") == DIFFERS_BY_MODE:
        return False
    home = type(gm.get_submodule(str(node.target))).__module__
    return not home.startswith(("torch.nn.", "torch.ao.nn.", "pdp_fx."))


@contextlib.contextmanager
def evaluating(gm: fx.GraphModule) -> Generator[None]:
    """Put every module into eval mode without the fused attention path, and back again."""
    modes = {module: module.training for module in gm.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    gm.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes.items():
            module.training = training


def run(
    gm: fx.GraphModule,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    flow: LabelFlow,
    after: After,
    can_mask: Callable[[fx.Node], bool],
) -> Record:
    """Run ``gm`` on ``inputs`` in eval mode with ``flow`` watching, and return what it saw."""
    placed = place_arguments(gm, inputs)
    with evaluating(gm), torch.no_grad(), flow:
        _FlowInterpreter(gm, flow, after, can_mask).run(*placed)
    return flow.record


def place_arguments(gm: fx.GraphModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Order positional and keyword arguments as the graph's placeholders want them."""
    args, kwargs = list(inputs[0]), dict(inputs[1])
    placed: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if args:
            placed.append(args.pop(0))
        elif name in kwargs:
            placed.append(kwargs.pop(name))
        elif node.args:
            placed.append(node.args[0])
    return placed
