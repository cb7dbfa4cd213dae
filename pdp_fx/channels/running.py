"""Driving a graph through `LabelFlow`, node by node, in eval mode and without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from pdp_fx.channels.flow import LabelFlow
from pdp_fx.channels.labels import Layer, Slot
from pdp_fx.channels.record import Labelled, stored
from pdp_fx.channels.rules_compute import axis_layer, consume
from pdp_fx.channels.rules_regions import pool_regions, pools_regions
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.interpreting import Interpreter
from pdp_fx.tracing.leaving import PUTS
from pdp_fx.tracing.modes import called_module, function_of
from pdp_fx.tracing.objects import AsSubclass, DrawNumber, MethodOf
from pdp_fx.tracing.restoring import blocks_ended
from pdp_fx.tracing.skipping import kept_unless
from pdp_fx.tracing.steps import DIFFERS_BY_MODE, DRAWS_OUTSIDE
from pdp_fx.tracing.structure import tensors as tensors_in
from pdp_fx.tracing.unfused import unfused_attention, unfused_recurrence
from pdp_fx.tracing.writer import REPAIRS

LEFT = "the model leaves these channels in what it is given"

_MAKERS = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
"""What a state is made by where it is not projected, but for the number of the layer."""

After = Callable[[fx.Node, LabelFlow, Any], None]


class _FlowInterpreter(Interpreter):
    """Runs the graph and tells the flow which node is running."""

    def __init__(
        self,
        gm: fx.GraphModule,
        flow: LabelFlow,
        after: After,
        can_mask: Callable[[fx.Node], bool],
        settle: Callable[[LabelFlow, Any], None],
    ) -> None:
        super().__init__(gm)
        self.settle = settle
        self.flow = flow
        self.unused = _repairs_in_training(gm.graph)
        self.after = after
        self.can_mask = can_mask

    def run_node(self, n: fx.Node) -> Any:
        self.flow.node = n.name
        self.flow.source = str(n.meta.get("source", ""))
        self.flow.sized = []
        self.flow.looked, self.flow.drew = False, _draws_outside(n)
        self.flow.varies = self.flow.record.tells_varying(n)
        self.flow.masks_norm = self.can_mask(n)
        result = self.run_followed(n)
        if self.flow.looked and n.meta.get("opaque") == DIFFERS_BY_MODE:
            # It has read a number out of a tensor, so in eval mode, too, it may act differently next time.
            result = self.run_unseen(n)
        self.after(n, self.flow, result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
            self.flow.record.masks.add(n.name)
        values = tuple(Labelled(tuple(t.shape), self.flow.layers(t)) for t in tensors)
        self.flow.record.values[n.name] = values
        if n.op == "get_attr":
            # Passes replace reads of parameters by others.
            self.flow.record.values[stored(str(n.target))] = values
        return result

    def run_followed(self, node: fx.Node) -> Any:
        """Run a node with labels, or without them if it is opaque."""
        if node in self.unused:
            with no_dispatch():
                return super().run_node(node)
        if pools_regions(self.module, node):
            with no_dispatch():
                result = super().run_node(node)
            pool_regions(self.flow, *self.fetch_args_kwargs_from_env(node), result)
            return result
        if node.target is kept_unless:
            return self.run_choice(node)
        if function_of(node) in PUTS:
            self.keep_left(node)
        if isinstance(function_of(node), AsSubclass):
            return self.run_subclassed(node)
        if is_opaque(self.module, node):
            return self.run_unseen(node)
        if function_of(node) in (torch.broadcast_tensors, torch.meshgrid):
            self.meet(node)
        module = self.fetch_attr(str(node.target)) if node.op == "call_module" else None
        unfused = unfused_recurrence if isinstance(module, nn.LSTM) else contextlib.nullcontext
        with unfused(), self.ahead_of_hooks(module):
            result = super().run_node(node)
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            self.bind_state(str(node.target), module)
        return result

    @contextlib.contextmanager
    def ahead_of_hooks(self, module: Any) -> Generator[None, None, None]:
        """Settle what a module computes before its own hooks get it; they may compute more."""
        if not isinstance(module, nn.Module) or not module._forward_hooks:
            yield
            return
        settled = module.register_forward_hook(lambda _, __, made: self.settle(self.flow, made), prepend=True)
        try:
            yield
        finally:
            settled.remove()

    def bind_state(self, path: str, module: nn.Module) -> None:
        """Tie what a recurrent module makes to what it reads as its state, which one step does not show.

        Args:
            path: the module's name.
            module: a layer or a cell, which has one number of channels for both.
        """

        def labels(weight: str, axis: int) -> Tensor | None:
            return self.flow.record.slots.get(Slot(f"{path}.{weight}", axis))

        for name in module._parameters:
            if not name.startswith("weight_hh"):
                continue
            rows, state = labels(name, 0), labels(name, 1)
            made, projected = state, labels(name.replace("hh", "hr"), 0)
            if state is not None and projected is not None:
                made = labels(name.replace("hh", "hr"), 1)
                self.flow.bind(state, projected)
            if rows is not None and made is not None:
                self.flow.bind(rows.reshape(-1, made.numel()), made)
            self.read_state(module._parameters, name.removeprefix("weight_hh"))

    def read_state(self, parameters: Mapping[str, Tensor | None], ending: str) -> None:
        """Contract the state that one direction of a layer makes with its weights, as the next step does.

        Args:
            parameters: those of a recurrent module.
            ending: how the names of those end that the direction has.
        """
        makers = ["weight_hr"] if f"weight_hr{ending}" in parameters else _MAKERS
        stored = [tensor for name in makers if (tensor := parameters.get(name + ending)) is not None]
        needs = [layer for tensor in stored if (layer := axis_layer(tensor, 0, self.flow)) is not None]
        weight = parameters[f"weight_hh{ending}"]
        columns = None if weight is None else axis_layer(weight, 1, self.flow)
        if columns is not None:
            zero = all(layer.all_zero for layer in needs)
            state = Layer(columns.ids, torch.full_like(columns.ids, zero, dtype=torch.bool), tuple(needs))
            consume(state, columns, self.flow)

    def meet(self, node: fx.Node) -> None:
        """Tie or freeze the tensors that a node is given, each of which it computes with alone.

        Its operations do not show that the sizes of each depend on those of the others.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if function_of(node) is torch.meshgrid:
            self.flow.freeze_all(given, "they span a grid")
            return
        # What happens in training only is given nothing here.
        for other in given[1:]:
            torch.eq(given[0], other)

    def keep_left(self, node: fx.Node) -> None:
        """Freeze what a node leaves in something that the model is given."""
        (*_, given, _, left), _ = self.fetch_args_kwargs_from_env(node)
        if not isinstance(given, Tensor):
            self.flow.freeze_all(list(tensors_in(left)), LEFT)

    def run_choice(self, node: fx.Node) -> Any:
        """Run a choice; what eval mode chooses at random, too, has the same channels in both ways."""
        (skipped, instead, made), _ = self.fetch_args_kwargs_from_env(node)
        if not isinstance(skipped, Tensor) or not isinstance(made, Tensor):
            return super().run_node(node)
        if isinstance(instead, Tensor) and (instead.shape, instead.dtype) == (made.shape, made.dtype):
            return torch.where(skipped.reshape(()), instead, made)
        self.flow.freeze_all(
            [each for each in (instead, made) if isinstance(each, Tensor)], "they are chosen at random"
        )
        return super().run_node(node)

    def run_subclassed(self, node: fx.Node) -> Any:
        """Run a node that makes a tensor one of a subclass, whose operations need not be those of torch."""
        (tensor,), _ = self.fetch_args_kwargs_from_env(node)
        with no_dispatch():
            result = super().run_node(node)
        if any(user.op != "output" for user in node.users):
            self.flow.freeze_all([tensor], f"a {type(result).__name__} computes in its own way")
            self.flow.put(result, ())
        else:
            self.flow.put(result, self.flow.layers(tensor))
        return result

    def run_unseen(self, node: fx.Node) -> Any:
        """Run a node whose code may act differently on other inputs: freeze all labels that go in."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        called = called_module(node)
        inside = None if called is None else self.fetch_attr(called)
        stored = [*inside.parameters(), *inside.buffers()] if isinstance(inside, nn.Module) else []
        if isinstance(inside, MethodOf):
            stored = [self.fetch_attr(name) for name in inside.uses]
        # Tensors of subclasses, such as nested ones, need their own dispatch in there.
        with _disable_current_modes():
            result = super().run_node(node)
        self.flow.freeze_all([*read, *stored], *why_unseen(inside, node))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in read):
                self.flow.put(leaf, ())
        return result


def _repairs_in_training(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that replace numbers which are not finite in training mode only, and what is made of them."""
    repairs: set[fx.Node] = set()
    for node in graph.nodes:
        if REPAIRS in node.meta or not repairs.isdisjoint(node.all_input_nodes):
            repairs.add(node)
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes) if repairs else ():
        if node in repairs and node.op != "output" and found.issuperset(node.users):
            found.add(node)
    return found


def _draws_outside(node: fx.Node) -> bool:
    """Whether a node draws a number from the generator of Python or NumPy."""
    return isinstance(function_of(node), DrawNumber)


def why_unseen(inside: object, node: fx.Node) -> tuple[str, str]:
    """Why channels are not followed through a node, and what would change it."""
    called = inside.method if isinstance(inside, MethodOf) else type(inside).__name__
    kind, how = node.name if inside is None else called, node.meta.get("opaque")
    if isinstance(inside, torch.jit.ScriptModule):
        return f"{kind} is compiled by TorchScript", "script the converted model instead"
    said = f": it {how}" if how and how != DIFFERS_BY_MODE else ""
    if said and "in a tensor" not in said:
        remedy = "draw them by torch, as in torch.rand([])" if DRAWS_OUTSIDE in said else ""
        return f"{kind} is kept whole{said}", remedy
    remedy = "choose with tensor operations such as torch.where"
    return f"{kind} decides by its data what it does{said}", remedy


KNOWN_HOMES = ("torch.nn.", "torch.ao.nn.", "pdp_fx.ops.", "pdp_fx.masks")
"""Python modules whose classes compute the same for every input, unless the tracer has found otherwise."""


def is_opaque(gm: nn.Module, node: fx.Node) -> bool:
    """Whether ``node`` was kept whole by the tracer because its code depends on its inputs.

    A module that only acts differently in training mode is not opaque: in eval mode it always does the same.
    """
    reason = node.meta.get("opaque")
    if reason == DIFFERS_BY_MODE:
        return False
    if reason or node.op != "call_module":
        return bool(reason)
    return not type(gm.get_submodule(str(node.target))).__module__.startswith(KNOWN_HOMES)


def gradients_if_taken(gm: fx.GraphModule) -> torch.set_grad_enabled:
    """A block with gradients only if the graph may take some itself, as models of forces or unknown code do.

    Elsewhere they would keep all activations alive.
    """
    takes = any(node.target is torch.autograd.grad or is_opaque(gm, node) for node in gm.graph.nodes)
    return torch.set_grad_enabled(takes)


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Generator[None]:
    """Put modules, with all in them, into eval mode without the fused attention path, and back again."""
    modes = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        with unfused_attention():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def run(
    gm: fx.GraphModule,
    inputs: Inputs,
    flow: LabelFlow,
    after: After,
    can_mask: Callable[[fx.Node], bool],
    settle: Callable[[LabelFlow, Any], None],
) -> Any:
    """Run ``gm`` on ``inputs`` in eval mode and return its output.

    Args:
        gm: the graph module.
        inputs: positional and keyword arguments.
        flow: moves the labels.
        after: called after each node with the node, ``flow`` and the result.
        can_mask: whether a node is a norm that can be given a mask.
        settle: called with ``flow`` and what a layer gives to its hooks.
    """
    placed = place_arguments(gm, inputs)
    # Otherwise autocast would reuse earlier casts of weights, tensors that carry no labels.
    torch.clear_autocast_cache()
    with blocks_ended(), evaluating(gm), gradients_if_taken(gm), flow:
        return _FlowInterpreter(gm, flow, after, can_mask, settle).run(*placed)
