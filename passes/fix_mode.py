"""Fix the graph to eval mode, the only mode of the converted model.

A traced graph follows ``.train()``: it reads the training flags of modules, picks one of two values by them,
and calls some functions in one mode only (`When`). Here every flag is replaced by False, and everything that
follows from it is computed.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.node import map_aggregate

from pdp_fx.compiler import Context, Pass
from pdp_fx.ops.kinds import named_modules
from pdp_fx.tracing.blocks import MAY_WAIT
from pdp_fx.tracing.erasing import erase
from pdp_fx.tracing.functions import acts_in_place
from pdp_fx.tracing.modes import When, asks_mode, unconditional
from pdp_fx.tracing.skipping import kept_unless


@dataclass(frozen=True)
class FixMode(Pass):
    """Leaves a graph in which nothing depends on a training flag."""

    name: ClassVar[str] = "fix-mode"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        gm.eval()
        modules = frozenset(name for name, _ in named_modules(gm))
        known: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            _substitute(node, known)
            if _is_flag(node, modules):
                known[node] = False
            elif node.target is operator.not_ and isinstance(node.args[0], bool):
                known[node] = not node.args[0]
            elif node.target is operator.getitem and isinstance(node.args[0], dict):
                known[node] = node.args[0][node.args[1]]
            elif isinstance(node.target, When) and not node.args[0]:
                known[node] = None
            elif node.target is kept_unless and not isinstance(node.args[0], fx.Node):
                known[node] = node.args[2]
        calls = [node for node in gm.graph.nodes if isinstance(node.target, When) and node not in known]
        for node in calls:
            node.op, node.target, node.args = unconditional(node)
        for node in reversed(known):
            erase(node, lambda source: source not in known and _does_nothing_else(source))
        return bool(known or calls)


def _substitute(node: fx.Node, known: dict[fx.Node, Any]) -> None:
    """Replace the known nodes among the arguments of ``node`` by their values."""
    if not any(source in known for source in node.all_input_nodes):
        return

    def value(leaf: Any) -> Any:
        return known.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf

    node.args, node.kwargs = map_aggregate(node.args, value), map_aggregate(node.kwargs, value)


def _is_flag(node: fx.Node, modules: frozenset[str]) -> bool:
    """Whether ``node`` reads the training flag of a module."""
    if not asks_mode(node) or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].op == "get_attr" and str(node.args[0].target) in modules


def _does_nothing_else(node: fx.Node) -> bool:
    """Whether ``node`` can be erased once its result has no users."""
    in_place = acts_in_place(node) and MAY_WAIT not in node.meta
    return node.op != "placeholder" and not node.is_impure() and not in_place
