"""Writing the nodes of a traced graph: attributes, constants, expressions, training flags, and steps.

Attributes, constants and expressions are written once. An expression is inserted right after the last of its
operands, even if it is first needed later, so that its position does not depend on which mode needs it first.
"""

import keyword
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.dropout import _DropoutNd

from pdp_fx.errors import TraceError
from pdp_fx.naming import free_name
from pdp_fx.tracing.blocks import MAY_WAIT
from pdp_fx.tracing.flags import ONE_MODE
from pdp_fx.tracing.modes import When
from pdp_fx.tracing.objects import MethodOf
from pdp_fx.tracing.steps import CHECKS, TRUTH, Step, Whole

_DRAWS_IN_TRAINING = (_DropoutNd, nn.RNNBase, nn.RReLU, nn.MultiheadAttention)
_ALWAYS_DRAWS = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CHANGES_STATE = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    *CHECKS,
)

DECIDES = "decides"
"""The entry of the `meta` of a check of sizes that says how the model's code goes by them."""

REPAIRS = "repairs"
"""The mark of nodes that compute what goes on where numbers are not finite."""

CONSTANT = "_tensor_constant"
"""The beginning of the names of constants: tensors from before the run, or made of plain numbers."""


@dataclass(frozen=True)
class Gate:
    """The condition of a gated step: the module ``owner`` is in training mode, or is not."""

    owner: str
    training: bool


class Writer:
    """A graph being written.

    Args:
        tree: the modules of the graph module to be; constants and the root's training flag are added to it.
        model: the model, for those of its methods that are kept whole.
        uses: the parameters and buffers that each of these methods uses.
    """

    def __init__(self, tree: nn.Module, model: nn.Module, uses: Mapping[Whole, frozenset[str]]) -> None:
        self.tree = tree
        self._model = model
        self._uses = uses
        self._methods: dict[Whole, str] = {}
        self.graph = fx.Graph()
        self.protected: set[fx.Node] = set()
        self._meta: dict[str, str] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._constants: list[tuple[torch.Tensor, str]] = []
        self._expressions: dict[Any, fx.Node] = {}
        self._tails: dict[fx.Node, fx.Node] = {}
        self._gates: dict[fx.Node, Gate] = {}
        self._root_mode = ""

    def at(self, owner: str, source: str) -> None:
        """Set the module and the source line of the nodes that are written next."""
        self._meta = {"owner": owner, "source": source}

    def step(self, step: Step, args: Any, kwargs: Any, gate: Gate | None = None) -> fx.Node:
        """Write a step; with a gate it is called only if the gate's condition holds."""
        target = self._method(step.target) if isinstance(step.target, Whole) else step.target
        if target is TRUTH:
            asked = ("call_method", "item", args[:1], {})
            args = (self._node(*asked) if gate is None else self._gated(*asked, gate), *args[1:])
        if gate is None:
            node = self._node(step.op, target, args, kwargs)
            self._reach_after(node)
        else:
            node = self._gated(step.op, target, args, kwargs, gate)
        if step.reason:
            node.meta["opaque"] = step.reason
        if step.repairs:
            node.meta[REPAIRS] = True
        if step.decides is not None:
            node.meta[DECIDES] = step.decides.value
        if step.observed or step.random or step.updates or step.tried:
            self.protected.add(node)
        return node

    def output(self, returned: Any) -> None:
        """Write what the graph returns."""
        self.graph.output(returned).meta.update(self._meta)

    def _method(self, whole: Whole) -> str:
        """The child of the tree that calls a method of the model or of one of its modules."""
        if whole not in self._methods:
            name = self._methods[whole] = free_name(self.tree, whole.method)
            self.tree.add_module(name, MethodOf(self._model, whole.path, whole.method, self._uses[whole]))
        return self._methods[whole]

    def attribute(self, path: str) -> fx.Node:
        """A parameter, a buffer or a module."""
        if path not in self._attributes:
            self._attributes[path] = self._node("get_attr", path, (), {})
        return self._attributes[path]

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A tensor that becomes a buffer of the graph module, outside its state dict."""
        for known, name in self._constants:
            if known is tensor or _equal(known, tensor):
                return self.attribute(name)
        name = free_name(self.tree, f"{CONSTANT}{len(self._constants)}")
        self.tree.register_buffer(name, tensor, persistent=False)
        self._constants.append((tensor, name))
        return self.attribute(name)

    def expression(
        self, call: str | Callable[..., Any], args: Any, kwargs: Any, gate: Gate | None = None
    ) -> fx.Node:
        """A call without side effects, right behind the last of its operands."""
        key = (call, _hashable(args), _hashable(kwargs))
        if key not in self._expressions:
            self._expressions[key] = self._hoisted(call, args, kwargs, gate)
            self._expressions[key].meta[MAY_WAIT] = True
        return self._expressions[key]

    def _hoisted(self, call: str | Callable[..., Any], args: Any, kwargs: Any, gate: Gate | None) -> fx.Node:
        operands = nodes_in((args, kwargs))
        op = "call_method" if isinstance(call, str) else "call_function"
        gate = self.gate_of(operands) or gate
        if not operands or gate is not None:
            return self._gated(op, call, args, kwargs, gate) if gate else self._node(op, call, args, kwargs)
        anchor = self._anchor(max(operands))
        with self.graph.inserting_after(self._tails.get(anchor, anchor)):
            node = self._tails[anchor] = self._node(op, call, args, kwargs)
        return node

    def _anchor(self, operand: fx.Node) -> fx.Node:
        """Behind which node to write what reads this one: itself, or the last of the inputs for an input."""
        if operand.op != "placeholder":
            return operand
        return [node for node in self.graph.nodes if node.op == "placeholder"][-1]

    def _reach_after(self, node: fx.Node) -> None:
        """Insert what is read of an input, or a part of one, after this node if it checks what that is.

        Otherwise a missing part would be Python's error, without a word of why it is expected.
        """
        if node.target is torch._assert:
            for asked in _asked_of_what_is_given(node.args[0]):
                self._tails[self._anchor(asked.all_input_nodes[0])] = node

    def flag(self, owner: str) -> fx.Node:
        """Whether a module is in training mode."""
        return self.expression(getattr, (self.attribute(owner or self._root_flag()), "training"), {})

    def check_alike(self, one: str, *others: str) -> None:
        """Write checks, once, that modules are in the same mode."""
        for other in others:
            alike = self.expression(operator.eq, (self.flag(one), self.flag(other)), {})
            if alike not in self.protected:
                message = f"{' and '.join(path or 'the model' for path in (one, other))} {ONE_MODE}"
                self.protected |= {alike, self._node("call_function", torch._assert, (alike, message), {})}

    def pick(self, in_eval: Any, in_train: Any, owner: str) -> fx.Node:
        """One value in eval mode, another in training mode."""
        flag = self.flag(owner)
        if in_eval is False and in_train is True:
            return flag
        if in_eval is True and in_train is False:
            return self.expression(operator.not_, (flag,), {})
        key = ("pick", _hashable((in_eval, in_train)), flag)
        if key not in self._expressions:
            choice = ({False: in_eval, True: in_train}, flag)
            self._expressions[key] = self._node("call_function", operator.getitem, choice, {})
            self._expressions[key].meta[MAY_WAIT] = True
        return self._expressions[key]

    def gate_of(self, args: Any) -> Gate | None:
        """The gate of an argument that is computed in one mode only, or None."""
        return next((self._gates[node] for node in nodes_in(args) if node in self._gates), None)

    def is_harmless(self, step: Step, training: bool) -> bool:
        """Whether a step of one mode (training or not) may also run in the other."""
        if step.observed or step.reason or step.target in _CHANGES_STATE:
            return False
        if step.op != "call_module":
            return not (step.random or step.updates)
        module = self.tree.get_submodule(str(step.target))
        if isinstance(module, _ALWAYS_DRAWS):
            return False
        return training or not (isinstance(module, _DRAWS_IN_TRAINING) or any(True for _ in module.buffers()))

    def _gated(self, op: str, target: Any, args: Any, kwargs: Any, gate: Gate) -> fx.Node:
        flag = self.flag(gate.owner)
        if not gate.training:
            flag = self.expression(operator.not_, (flag,), {})
        module = (self.attribute(target),) if op == "call_module" else ()
        # It goes by the name of what it computes.
        node = self._node(op, target, args, kwargs)
        function = operator.call if module else node.target
        node.op, node.target, node.args = "call_function", When(function), (flag, *module, *node.args)
        self._gates[node] = gate
        return node

    def _node(self, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        if target is operator.pow and isinstance(args[0], int | float) and math.copysign(1, args[0]) < 0:
            # Generated code has no brackets in -1 ** x.
            target = pow
        _refuse_unwritable(op, str(target))
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        node.meta.update(self._meta)
        return node

    def _root_flag(self) -> str:
        if not self._root_mode:
            self._root_mode = free_name(self.tree, "mode")
            self.tree.add_module(self._root_mode, nn.Identity().train(self.tree.training))
        return self._root_mode


def _refuse_unwritable(op: str, name: str) -> None:
    """Refuse names that the code of a graph module cannot have: keywords, and ``self`` by itself."""
    what = "an argument" if op == "placeholder" else "a part"
    if op not in ("placeholder", "get_attr", "call_module"):
        return
    if name == "self" or any(map(keyword.iskeyword, name.split("."))):
        raise TraceError(
            f"the model has {what} {name!r}, which the code of a torch.fx.GraphModule cannot name, because "
            "keywords of Python and 'self' stand for something else there; rename it"
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_kind = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same_kind and not (one.requires_grad or other.requires_grad) and torch.equal(one, other)


def nodes_in(args: Any) -> list[fx.Node]:
    """The nodes among arguments."""
    found: list[fx.Node] = []
    map_arg(args, found.append)
    return found


def _asked_of_what_is_given(condition: Any) -> list[fx.Node]:
    """The nodes of a condition that ask for a length, keys, a class, or how many axes a tensor has."""
    asked = condition.all_input_nodes if isinstance(condition, fx.Node) else []
    kinds = (operator.length_hint, list, sorted, type, torch.is_tensor, "dim")
    return [node for node in asked if node.target in kinds]


def _hashable(arg: Any) -> Any:
    if isinstance(arg, tuple | list):
        return type(arg).__name__, tuple(_hashable(part) for part in arg)
    if isinstance(arg, dict):
        return "dict", tuple((key, _hashable(part)) for key, part in arg.items())
    if isinstance(arg, slice):
        return "slice", _hashable((arg.start, arg.stop, arg.step))
    return type(arg), repr(arg) if isinstance(arg, float) else arg
