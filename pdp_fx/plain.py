"""`plain`: a graph module that holds only types of torch, Python and the user, and that pickles exactly."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from pdp_fx.naming import free_name
from pdp_fx.ops.data import data_of
from pdp_fx.standalone import exact
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
    new_of,
)
from pdp_fx.tracing.skipping import kept_unless


def plain(gm: fx.GraphModule) -> fx.GraphModule:
    """Return ``gm`` as a bare graph module in eval mode that holds only what its graph uses."""
    places = _put_owners(gm)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {}
        _write_plainly(gm, node, places)
    bare = exact(fx.GraphModule(gm, graph, type(gm).__name__))
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
    made = node.graph.call_function(_named(partial(new_of(build.kind), build.kind), f"new_{name}"))
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
