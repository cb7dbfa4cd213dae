"""Calls that happen in one mode only, as nodes of a graph (`When`)."""

import contextlib
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import has_side_effect


@dataclass(frozen=True)
class When:
    """A function or method that is called only if the first argument is true; otherwise the result is None.

    A graph has no branches: a step that draws random numbers or updates a buffer in training only is a call
    of `When(function)` on the training flag and the arguments. A method goes by its name.
    """

    function: Callable[..., Any] | str

    def __hash__(self) -> int:
        return hash(When)

    def __reduce__(self) -> tuple[Any, ...]:
        return When, (self.function,)

    @property
    def __name__(self) -> str:
        name = self.function if isinstance(self.function, str) else self.function.__name__
        return f"when_{name.strip('_')}"

    def __call__(self, condition: bool, *args: Any, **kwargs: Any) -> Any:
        if not condition:
            return None
        if isinstance(self.function, str):
            return getattr(args[0], self.function)(*args[1:], **kwargs)
        return self.function(*args, **kwargs)


class _AnyWhen:
    """Equal to every `When`.

    What has side effects is in one set of `torch.fx`, for good. As one entry it stands for all of them, which
    may hold what the user wants to be freed.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, When)

    def __hash__(self) -> int:
        return hash(When)


has_side_effect(_AnyWhen())  # pyright: ignore[reportArgumentType]


def asks_mode(node: fx.Node) -> bool:
    """Whether ``node`` reads whether a module is in training mode."""
    return node.target is getattr and str(node.args[1]) == "training"


def function_of(node: fx.Node) -> Any:
    """The target of ``node``, be it called in one mode only."""
    return node.target.function if isinstance(node.target, When) else node.target


def unconditional(node: fx.Node) -> tuple[str, Any, tuple[Any, ...]]:
    """The op, the target and the arguments of a call of `When` as those of a node that always calls."""
    function, args = node.target.function, node.args[1:]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    called = args[0] if function is operator.call else None
    if isinstance(called, fx.Node) and called.op == "get_attr":
        return "call_module", str(called.target), args[1:]
    return ("call_method" if isinstance(function, str) else "call_function"), function, args


@contextlib.contextmanager
def in_eval_form(graph: fx.Graph) -> Generator[None]:
    """Write what is called in eval mode only as called always, pick by mode what eval picks, and back again.

    Whoever looks at a graph in eval mode only need not know of modes then.
    """
    saved: list[tuple[fx.Node, str, Any, tuple[Any, ...]]] = []
    for node in graph.nodes:
        before = node, node.op, node.target, node.args
        if isinstance(node.target, When) and _is_of_eval(node.args[0]):
            node.op, node.target, node.args = unconditional(node)
        elif node.target is operator.getitem and isinstance(node.args[0], dict):
            chosen = node.args[0][False]
            node.args = ({False: chosen, True: chosen}, node.args[1])
        else:
            continue
        saved.append(before)
    try:
        yield
    finally:
        for node, op, target, args in saved:
            node.op, node.target, node.args = op, target, args


def _is_of_eval(condition: Any) -> bool:
    """Whether a condition of `When` is the negation of a training flag."""
    return isinstance(condition, fx.Node) and condition.target is operator.not_


def called_module(node: fx.Node) -> str | None:
    """The name of the module that ``node`` calls, be it in one mode only; None if it calls no module."""
    if node.op == "call_module":
        return str(node.target)
    called = node.args[1] if isinstance(node.target, When) and node.target.function is operator.call else None
    return str(called.target) if isinstance(called, fx.Node) and called.op == "get_attr" else None


def called_modules(graph: fx.Graph) -> list[str]:
    """The names of the modules that a graph calls, be it in one mode only, each once."""
    return list(dict.fromkeys(name for node in graph.nodes if (name := called_module(node)) is not None))
