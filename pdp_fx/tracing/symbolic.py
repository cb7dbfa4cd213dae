"""Tracing without example inputs: `fx` symbolic tracing with our leaf rule.

It calls the model with values that stand for tensors, and sees what is done with these. Nothing is run, so
the graph cannot be compared with the model. All that such a value does not see is therefore refused: what is
computed from other tensors, blocks that set a mode, random numbers, functions with a gradient of their own.
"""

import builtins
import operator
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute as AttributeProxy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pdp_fx.errors import TraceError
from pdp_fx.tracing import functions
from pdp_fx.tracing.applies import with_apply
from pdp_fx.tracing.generators import generators_restored, random_state
from pdp_fx.tracing.given import check_inputs
from pdp_fx.tracing.leaves import is_leaf
from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.shapes import Facts
from pdp_fx.tracing.source import NO_LINE, is_users, runs_model, source_line, source_of
from pdp_fx.tracing.steps import Attribute, Recording, Scope, Step

_BLOCKS = (
    (torch.no_grad, "__enter__"),
    (torch.enable_grad, "__enter__"),
    (torch.set_grad_enabled, "__init__"),
    (torch.inference_mode, "__enter__"),
    (torch.autocast, "__enter__"),
)
"""Where blocks begin that set for torch how to compute what is inside."""

_ISINSTANCE = isinstance

_QUESTIONS = ("is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled")
"""The functions of torch by which a model asks about such blocks around it."""


def _is_of_model(frame: FrameType) -> bool:
    return is_users(frame.f_code.co_filename)


class _Stands(fx.Proxy):
    """Stands for a value of the model; to code that asks, it is a tensor, which the graph checks."""

    tracer: "SymbolicTracer"

    def __getattr__(self, k: str) -> "_Attribute":
        return _Attribute(self, k)

    def __setattr__(self, name: str, value: object) -> None:
        if _is_of_model(sys._getframe(1)):
            raise TraceError(f"it sets the attribute {name} of a tensor")
        super().__setattr__(name, value)

    def __setitem__(self, index: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class _Value(_Stands):
    """Stands for what a node computes."""


class _Attribute(_Stands, AttributeProxy):
    """Stands for an attribute of a value."""


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[_Stands, Any], fx.Proxy]:
    """The method of a value for an operator such as ``+=``, which `fx` takes for ``+``."""
    return lambda value, other: value.tracer.create_proxy("call_function", function, (value, other), {})


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(_Stands, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class SymbolicTracer(fx.Tracer):
    """The `fx` tracer with our leaf rule, noting for each node its source line and its owner."""

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.left_out: dict[str, Any] = {}
        self._are_tensors: set[fx.Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Apply the leaf rule."""
        return is_leaf(m)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Make the node, then note where it comes from."""
        node = super().create_node(*args, **kwargs)
        path = self.scope.module_path
        node.meta["owner"] = path.rpartition(".")[0] if node.op == "call_module" else path
        node.meta["source"] = source_line()
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The value that stands for what a node computes."""
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        """Make an argument of a node; of tensors there may be parameters and buffers only."""
        if isinstance(a, torch.Tensor) and id(a) not in self._known:
            raise TraceError("it uses a tensor that is no input, parameter or buffer")
        return super().create_arg(a)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Make the placeholders; an argument whose default is None, a truth value or a text is left out."""
        function, made = super().create_args_for_root(*args, **kwargs)
        defaults = {proxy: proxy.node.args for proxy in made if type(proxy) is _Value}
        self.left_out = {
            str(proxy.node.target): default[0]
            for proxy, default in defaults.items()
            if default and isinstance(default[0], bool | str | None)
        }
        return function, [
            defaults[value][0] if type(value) is _Value and value.node.target in self.left_out else value
            for value in made
        ]

    def take_for_tensor(self, value: _Stands) -> None:
        """Add a check that a value is a tensor."""
        if value.node not in self._are_tensors:
            self._are_tensors.add(value.node)
            message = "traced without example inputs, this is a graph for a tensor here; pass example_inputs"
            is_tensor = self.create_node("call_function", torch.is_tensor, (value.node,), {})
            self.create_node("call_function", torch._assert, (is_tensor, message), {})


class _OfValuesOnly(TorchFunctionMode):
    """Refuses torch functions of no input or state of the model: their results would be constants."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        of_values = any(issubclass(type(leaf), fx.Proxy) for leaf in tree_leaves((args, kwargs)))
        name = functions.name_of(func)
        harmless = func is torch._assert or functions.only_looks(name, len(args) + len(kwargs))
        if not of_values and not harmless:
            raise TraceError(f"it computes {name} of no input")
        return func(*args, **kwargs)


@runs_model
def symbolic_recording(model: nn.Module) -> Recording:
    """What a model does in its current mode, as far as that can be told without running it.

    Raises:
        TraceError: only a run on example inputs can tell.
    """
    try:
        graph, left_out = _graph(model)
        # What the model keeps from one call to the next makes another graph.
        if str(_graph(model)[0]) != str(graph):
            raise TraceError("it does something else when it is called again")
    except Exception as err:
        line = source_of(err)
        where = "" if line == NO_LINE else f" ({line})"
        raise TraceError(
            f"cannot trace {type(model).__name__} without example inputs: {err}{where}; "
            "pass example_inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments"
        ) from err
    values: dict[fx.Node, Any] = {}
    scopes: dict[str, Scope] = {"": Scope("")}
    fixed: Facts = []

    def scope(path: str) -> Scope:
        if path not in scopes:
            scopes[path] = Scope(path, 1, scope(path.rpartition(".")[0]))
        return scopes[path]

    def values_in(args: Any) -> Any:
        return map_arg(args, values.__getitem__)

    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = Attribute(str(node.target))
        elif node.op != "output":
            args, kwargs = values_in(node.args), values_in(node.kwargs)
            where = scope(node.meta["owner"])
            step = Step(node.op, node.target, args, kwargs, where, node.meta["source"])
            step.observed = _is_seen_elsewhere(node)
            values[node] = step
        if node.op == "placeholder" and node.target in left_out:
            fixed.append((values[node], left_out[node.target]))
    steps = [value for value in values.values() if isinstance(value, Step)]
    if fixed:
        steps.insert(len(graph.find_nodes(op="placeholder")), check_inputs(fixed, scopes[""]))
    return Recording(tuple(steps), values_in(graph.output_node().args[0]), dict.fromkeys(scopes.values(), ()))


def _graph(model: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph of a model in its current mode, and the arguments that it leaves out, with their defaults."""
    tracer, before = SymbolicTracer(model), random_state()
    with generators_restored():
        with _unseen_refused(model):
            graph = tracer.trace(model)
        if random_state() != before:
            raise TraceError("it draws random numbers")
    return graph, tracer.left_out


def _is_seen_elsewhere(node: fx.Node) -> bool:
    """Whether a node without users may do something all the same: change its input, or statistics."""
    return not node.users and (node.op == "call_module" or functions.acts_in_place(node))


def _is_instance(thing: object, kinds: Any) -> bool:
    """What `isinstance` tells the model: that a value is a tensor."""
    found, frame = _ISINSTANCE(thing, kinds), sys._getframe(1)
    if found or not issubclass(type(thing), _Stands):
        return found
    if not _is_of_model(frame) and frame.f_code is not torch.is_tensor.__code__:
        return found
    value = cast(_Stands, thing)
    value.tracer.take_for_tensor(value)
    return issubclass(torch.Tensor, kinds)


@contextmanager
def _unseen_refused(model: nn.Module) -> Generator[None, None, None]:
    """Refuse what values do not see."""

    def answering(answer: Callable[..., bool]) -> Callable[..., bool]:
        def asks(*args: Any) -> bool:
            if _is_of_model(sys._getframe(1)):
                raise TraceError(f"it asks torch.{answer.__name__}")
            return answer(*args)

        return asks

    def begins(*args: Any, **kwargs: Any) -> None:
        raise TraceError("it begins a block in which torch computes in another way")

    def applies(kind: type, *args: Any) -> None:
        raise TraceError(f"it calls the autograd function {kind.__name__}")

    with ExitStack() as stack:
        for kind, name in _BLOCKS:
            stack.enter_context(replaced(kind, name, begins))
        for name in _QUESTIONS:
            stack.enter_context(replaced(torch, name, answering(getattr(torch, name))))
        stack.enter_context(replaced(builtins, "isinstance", _is_instance))
        stack.enter_context(with_apply(model, applies))
        stack.enter_context(_OfValuesOnly())
        yield
