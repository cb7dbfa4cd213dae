"""`plain`: a graph module that holds only types of torch, Python and the user, and that pickles exactly.

`torch.fx` pickles a graph module as source code, and traces that code again when it is loaded. What does not
depend on an input, such as a random number or a slice of a buffer, is then computed once and frozen; and what
a proxy cannot do, such as assigning to a slice, fails. So the converted graph module pickles its graph as the
calls that build it. They are all calls of torch and of Python's library, since whoever loads it may not have
this package. Every graph module has a class of its own anyway, which is where the methods for that are set.
"""

from __future__ import annotations

import importlib
import operator
import pickle
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import _get_qualified_name, map_aggregate

from pdp_fx.naming import free_name
from pdp_fx.ops.data import data_of
from pdp_fx.tracing.modes import called_modules
from pdp_fx.tracing.objects import (
    Apply,
    AsSubclass,
    Bound,
    Build,
    DrawNumber,
    Fill,
    Held,
    MethodOf,
    join_methods,
)
from pdp_fx.tracing.skipping import kept_unless

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "training")


def plain(gm: fx.GraphModule) -> fx.GraphModule:
    """Return ``gm`` as a bare graph module in eval mode that holds only what its graph uses."""
    places = _put_owners(gm)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {}
        _write_plainly(gm, node, places)
    bare = _exact(fx.GraphModule(gm, graph, type(gm).__name__))
    bare.graph.lint()
    return bare.eval()


def _write_plainly(gm: fx.GraphModule, node: fx.Node, places: Mapping[str, str]) -> None:
    """Replace the node's target by calls of torch and Python's library, if it belongs to this package.

    Args:
        gm: the graph module with all attributes.
        node: the node.
        places: as `_put_owners` gives them.
    """
    if isinstance(node.target, Apply):
        node.target = _named(partial(node.target.kind.apply), node.target.__name__)
    elif isinstance(node.target, Bound):
        method = getattr(node.target.thing, node.target.method)
        node.target = _named(partial(method), node.target.__name__)
    elif isinstance(node.target, AsSubclass):
        method = operator.methodcaller("as_subclass", node.target.kind)
        node.target = _named(partial(method), node.target.__name__)
    elif isinstance(node.target, Held):
        node.target = _named(partial(operator.itemgetter(0), (node.target.thing,)), node.target.__name__)
    elif isinstance(node.target, Build):
        with node.graph.inserting_before(node):
            _make_object(node, node.target)
    elif isinstance(node.target, DrawNumber):
        with node.graph.inserting_before(node):
            # A function of Python's generator itself would be pickled with the state of that.
            home = node.graph.call_function(importlib.import_module, (node.target.home,))
            number = node.graph.call_method(node.target.name, (home, *node.args))
        node.target, node.args = torch.tensor, (number,)
        node.kwargs = {"dtype": torch.float64, "device": "cpu"}
    elif node.target is kept_unless:
        skipped, instead, made = node.args
        with node.graph.inserting_before(node):
            asked = node.graph.call_function(bool, (skipped,))
        ways: Any = {True: instead, False: made}
        node.target, node.args = operator.getitem, (ways, asked)
    elif isinstance(node.target, Fill):
        with node.graph.inserting_before(node):
            _fill_record(node, node.target)
    elif node.op == "call_module" and isinstance(called := gm.get_submodule(str(node.target)), MethodOf):
        with node.graph.inserting_before(node):
            owner = node.graph.get_attr(places.get(called.path, called.path))
        node.op, node.target, node.args = "call_method", called.method, (owner, *node.args)
    elif node.target is data_of:
        node.op, node.target = "call_method", "detach"
    elif node.op == "get_attr":
        node.target = places.get(str(node.target), node.target)


def _put_owners(gm: fx.GraphModule) -> dict[str, str]:
    """Put the objects whose methods are kept whole into the tree, where there are empty shells for them.

    A graph module is not of the model's class, so an object that has the model's methods becomes a submodule,
    with what they use. Tensors have one owner, since a cast may replace them in each module that has them.

    Returns:
        By their paths in the model, where the model itself and tensors of it are, if not there any more.
    """
    join_methods(gm)
    called = [gm.get_submodule(name) for name in called_modules(gm.graph)]
    methods = [module for module in called if isinstance(module, MethodOf)]
    owners = {method.path: method.owner for method in methods if method.path}
    for path in sorted(owners, key=lambda path: path.count(".")):
        gm.set_submodule(path, owners[path])
    of_model = [method for method in methods if not method.path]
    if not of_model:
        return {}
    model = of_model[0].owner_with(gm, frozenset[str]().union(*(method.uses for method in of_model)))
    name = free_name(gm, "model")
    gm.add_module(name, model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {"": name} | {path: f"{name}.{path}" for path, _ in tensors}


def _make_object(node: fx.Node, build: Build) -> None:
    """Replace a `Build` node by nodes that make the object without its constructor and set its attributes."""
    name = build.kind.__name__
    made = node.graph.call_function(_named(partial(object.__new__, build.kind), f"new_{name}"))
    table = node.graph.call_function(vars, (made,))
    given = node.graph.call_method("update", (table, *node.args))
    fixed = operator.methodcaller("update", dict(build.fixed))
    fixing = node.graph.call_function(_named(partial(fixed), f"fix_{name}"), (table,))
    node.target, node.args = operator.getitem, ((made, given, fixing), 0)


def _fill_record(node: fx.Node, fill: Fill) -> None:
    """Replace a `Fill` node by nodes that make an empty record and set its fields and items."""
    made = node.graph.call_function(fill.kind)
    (items,) = node.args
    given = [
        node.graph.call_function(put, (made, key, item))
        for key, item in cast(Mapping[str, Any], items).items()
        for put in (setattr, operator.setitem)
    ]
    node.target, node.args = operator.getitem, ((made, *given), 0)


def _named(function: partial[Any], name: str) -> Callable[..., Any]:
    """The partial with a ``__name__`` and ``__module__``, which code generation needs."""
    named: Any = function
    named.__name__, named.__module__ = name, "functools"
    return named


def _exact(bare: fx.GraphModule) -> fx.GraphModule:
    """Set the methods by which this one graph module pickles and deep-copies as described above."""
    kind: Any = type(bare)
    kind.__reduce__ = _reduce
    kind._deepcopy_init = _copier
    return bare


def _copier(bare: fx.GraphModule) -> Callable[[fx.GraphModule, nn.Module, fx.Graph], None]:
    def init(copied: fx.GraphModule, root: nn.Module, graph: fx.Graph) -> None:
        fx.GraphModule.__init__(copied, root, graph, type(bare).__name__)
        _exact(copied)

    return init


def _reduce(bare: fx.GraphModule) -> tuple[Any, ...]:
    """What pickle needs: a callable, its arguments, and the attributes that a user has added."""
    made = _Made(fx.GraphModule, _tree(bare), _graph(bare.graph), type(bare).__name__)
    usual = vars(fx.GraphModule(nn.Module(), fx.Graph()))
    added = {name: value for name, value in vars(bare).items() if name not in usual}
    return operator.methodcaller("train", bare.training), (made,), added or None


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
