"""`exact`: a graph module that pickles as the calls that build its graph, and restores settings on errors.

`torch.fx` pickles a graph module as source code, and traces that code again when it is loaded. What does not
depend on an input, such as a random number or a slice of a buffer, is then computed once and frozen; and what
a proxy cannot do, such as assigning to a slice, fails. Every graph module has a class of its own anyway,
which is where the methods for another way are set.

A graph is flat: one node enters a block of autocast or without gradients, another restores what was before.
Only the generated code has an error between the two restore it, so that a failed call leaves the caller's
process as it was.

Whoever loads such a pickle may not have this package, and may pickle again what is loaded. So all calls are
of torch and of Python's library, and the text of this file, which imports nothing else, is in each pickle:
loading runs it, and sets the same methods.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import pickle
import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode
from torch.fx.node import _get_qualified_name, map_aggregate

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "training")


def exact(bare: fx.GraphModule) -> fx.GraphModule:
    """Set the methods by which this one graph module does what is described above."""
    kind: Any = type(bare)
    kind.recompile = _recompile
    kind.__reduce__ = _reduce
    kind.__copy__ = _copy
    kind._deepcopy_init = _copier
    bare.recompile()
    return bare


def _recompile(bare: fx.GraphModule) -> PythonCode:
    """Generate the code of the graph, in which an error that leaves a block restores what was before it."""
    spans = changed_settings(bare.graph)
    if not spans:
        return fx.GraphModule.recompile(bare)
    with bare.graph.on_generate_code(lambda _: partial(restored_on_errors, spans=spans)):
        return fx.GraphModule.recompile(bare)


def _copy(bare: fx.GraphModule) -> fx.GraphModule:
    copied: Any = fx.GraphModule.__copy__(bare)
    return exact(copied)


def _copier(bare: fx.GraphModule) -> Callable[[fx.GraphModule, nn.Module, fx.Graph], None]:
    def init(copied: fx.GraphModule, root: nn.Module, graph: fx.Graph) -> None:
        fx.GraphModule.__init__(copied, root, graph, type(bare).__name__)
        exact(copied)

    return init


def _reduce(bare: fx.GraphModule) -> tuple[Any, ...]:
    """What pickle needs: a callable, its arguments, and the attributes that a user has added."""
    made = _Made(fx.GraphModule, _tree(bare), _graph(bare.graph), type(bare).__name__)
    usual = vars(fx.GraphModule(nn.Module(), fx.Graph()))
    added = {name: value for name, value in vars(bare).items() if name not in usual}
    return operator.methodcaller("train", bare.training), (_made_exact(made),), added or None


def _made_exact(made: _Made) -> _Made:
    """The calls that run the text of this file, and its `exact` with what is made."""
    # Where a pickle has run this text, it is no module that could be asked for it.
    text = globals().get("TEXT") or inspect.getsource(sys.modules[__name__])
    names = {"__name__": "exact_pickling", "TEXT": text}
    code = _Made(builtins.compile, text, "<exact pickling>", "exec")
    run = _Made(operator.itemgetter(0), (names, _Made(builtins.exec, code, names)))
    return _Made(operator.call, _Made(operator.itemgetter("exact"), run), made)


def _tree(bare: fx.GraphModule) -> nn.Module:
    """A module with all that belongs to ``bare``, but no graph."""
    root = nn.Module()
    vars(root).update({name: value for name, value in vars(bare).items() if name in _TABLES})
    return root


def _graph(graph: fx.Graph) -> _Made:
    """The graph as the calls that create its nodes, in order."""
    new = _Made(fx.Graph)
    nodes: dict[fx.Node, _Made] = {}

    def encoded(leaf: Any) -> Any:
        if isinstance(leaf, torch.memory_format):
            # The protocol of torch.save has no way to store it.
            return _Made(pkgutil.resolve_name, str(leaf))
        return nodes[leaf] if isinstance(leaf, fx.Node) else leaf

    for node in graph.nodes:
        args, kwargs = map_aggregate(node.args, encoded), map_aggregate(node.kwargs, encoded)
        create = operator.methodcaller("create_node", node.op, _target(node), args, kwargs, node.name)
        nodes[node] = _Made(create, new)
    return _Made(operator.itemgetter(0), (new, *nodes.values()))


class _Made:
    """An object given by the call that makes it: pickle stores the call, and makes the object once."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.args


def _target(node: fx.Node) -> Any:
    """The target of a node as pickle can store it: itself, or the call that imports it."""
    if isinstance(node.target, (str, partial)) or _is_known_to_pickle(node.target):
        return node.target
    name = _get_qualified_name(node.target)
    if pkgutil.resolve_name(name) is not node.target:
        raise pickle.PicklingError(f"%{node.name} calls {name}, but importing that name gives something else")
    return _Made(pkgutil.resolve_name, name)


def _is_known_to_pickle(function: Callable[..., Any]) -> bool:
    try:
        return pickle.loads(pickle.dumps(function)) is function
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return False


_CASTS = torch.amp.autocast_mode._enter_autocast

_ENDED_BY: dict[Any, Any] = {
    torch.is_grad_enabled: torch._C._set_grad_enabled,
    _CASTS: torch.amp.autocast_mode._exit_autocast,
}
"""What ends a block, given the value of the node that enters it."""


class Span(NamedTuple):
    """A block that changes a setting, from one node to another.

    Attributes:
        entry: the node whose value restores the setting.
        end: the node that does so.
    """

    entry: fx.Node
    end: fx.Node


def changed_settings(
    graph: fx.Graph, function_of: Callable[[fx.Node], Any] = lambda node: node.target
) -> list[Span]:
    """The blocks of a graph, those inside others first; each is beside or wholly inside another.

    Those inside a block of their kind end, too: torch counts the open blocks of autocast, and forgets the
    weights that it has cast when there are none.

    Args:
        graph: the graph.
        function_of: what a node calls.
    """
    found: list[Span] = []
    entered: list[fx.Node] = []
    for node in graph.nodes:
        end = _ENDED_BY.get(node.target)
        if end is not None and any(function_of(user) is end for user in node.users):
            entered.append(node)
        elif entered and entered[-1] in node.all_input_nodes:
            found.append(Span(entered.pop(), node))
    return found


def restored_on_errors(body: Sequence[str], spans: Sequence[Span]) -> list[str]:
    """The lines of a graph's code, in which an error that leaves a block restores what was before it.

    Blocks of autocast are written as such, which every version of torch compiles.

    Args:
        body: the lines that fx generates, whose blocks of code are those of the nodes.
        spans: what `changed_settings` has found in the graph.
    """
    lines = "".join(body).splitlines(keepends=True)
    for entry, end in spans:
        first, last = (_line_of(node, lines) for node in (entry, end))
        before, *inside = lines[first : last + 1]
        margin = before[: len(before) - len(before.lstrip())]
        if entry.target is _CASTS:
            call, _, freed = before.partition("._enter_autocast(")[2].rstrip().partition(";  ")
            computes = any(line.lstrip()[:1] not in ("", "#") for line in inside[:-1])
            # fx puts comments between the nodes, which are not enough for a block.
            begun = freed or ("" if computes else "pass")
            inside = [f"{margin}{begun}\n" if begun else "", *inside[:-1]]
            lines[first : last + 1] = [f"{margin}with torch.autocast({call}:\n", *_indented(inside)]
        else:
            lines[first + 1 : last + 1] = [
                f"{margin}try:\n",
                *_indented(inside),
                f"{margin}except BaseException:\n",
                f"{margin}    torch._C._set_grad_enabled({entry!r})\n",
                f"{margin}    raise\n",
            ]
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines if line.strip()]


def _line_of(node: fx.Node, lines: Sequence[str]) -> int:
    return next(i for i, line in enumerate(lines) if line.lstrip().startswith(f"{node!r} = "))
