"""Calls that happen in one mode only, as nodes of a graph (`When`)."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import has_side_effect


@dataclass(frozen=True)
class When:
    """A function that is called only if its first argument is true, and otherwise gives None.

    A graph has no branches: a step that draws random numbers or updates a buffer in training only is a call
    of `When(function)` on the training flag and the arguments.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        has_side_effect(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return When, (self.function,)

    @property
    def __name__(self) -> str:
        return f"when_{self.function.__name__.strip('_')}"

    def __call__(self, condition: bool, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs) if condition else None


def called_module(node: fx.Node) -> str | None:
    """The name of the module that ``node`` calls, be it in one mode only; None if it calls no module."""
    if node.op == "call_module":
        return str(node.target)
    called = node.args[1] if isinstance(node.target, When) and node.target.function is operator.call else None
    return str(called.target) if isinstance(called, fx.Node) and called.op == "get_attr" else None


def called_modules(graph: fx.Graph) -> list[str]:
    """The names of the modules that a graph calls, be it in one mode only, each once."""
    return list(dict.fromkeys(name for node in graph.nodes if (name := called_module(node)) is not None))
