"""What a recording is made of: steps in the order they happened, and values that refer to them.

A *step* is one thing the model did: a torch function, a method of a tensor, a leaf module. A *value* says
where something comes from: a step's result, a parameter by name, or an expression over other values, such as
"axis 1 of the size of that result, divided by 2". Expressions are not steps: they are written into the graph
only where a step uses them, so two recordings of one model differ in their steps only if the model acted
differently.
"""

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from pdp_fx.tracing.outcome import Outcome

DIFFERS_BY_MODE = "acts differently in training mode"
"""Why a module without weights is kept whole although its data do not decide what it does."""


@dataclass(frozen=True)
class Scope:
    """One call of a module: its path, and the how manieth call of that path it is.

    The root has the empty path and no parent.
    """

    path: str
    count: int = 0
    parent: "Scope | None" = None


@dataclass(frozen=True)
class Whole:
    """What is one step when it is called: the tracer does not look inside.

    Attributes:
        path: of a module.
        method: the name of one method of the module, or of a function.
        holder: the Python module or the class that has the function, if it is none of the model's methods.
    """

    path: str
    method: str = ""
    holder: ModuleType | type | None = None

    def __str__(self) -> str:
        if self.holder is not None:
            return f"{self.holder.__name__}.{self.method}"
        return f"{self.path or 'the model'}.{self.method}" if self.method else self.path


@dataclass(eq=False)
class Step:
    """One recorded call.

    Attributes:
        op: `placeholder`, `call_function`, `call_method` or `call_module`, as in `torch.fx`.
        target: as in `torch.fx`; a method of the model itself, as a `call_module` of a `Whole`.
        args: positional arguments; values stand for what was computed.
        kwargs: keyword arguments, likewise.
        scope: the module call that it happened in.
        source: the user's line, `file.py:line`.
        data: whether its numbers depend on inputs, parameters, buffers or chance, so that no branch may use
            them.
        ragged: whether its sizes depend on such numbers.
        varies: whether inputs had a part in it, if only by their sizes.
        changes: the values it changes in place.
        observed: whether somebody other than the users of its result sees that change.
        random: whether it drew random numbers.
        updates: whether it changed running statistics, or other buffers of the module that it is.
        reason: for an opaque module, why it was not traced through.
        reads_numbers: whether something opaque read numbers out of tensors.
        sized: whether the model reads such sizes.
        decides: whether it checks what users' code has found true of sizes.
    """

    op: str
    target: str | Whole | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: Scope
    source: str
    data: bool = True
    ragged: bool = False
    varies: bool = True
    changes: "tuple[Value, ...]" = ()
    observed: bool = False
    random: bool = False
    updates: bool = False
    reason: str = ""
    reads_numbers: bool = False
    sized: bool = False
    decides: bool = False

    @property
    def called(self) -> str:
        """What a reader knows the target as."""
        return str(getattr(self.target, "__name__", self.target))


@dataclass(frozen=True)
class Attribute:
    """A parameter, a buffer or another attribute of the model, by its dotted name."""

    path: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that no module owns, made before the model ran or from numbers that the graph does not see."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Expr:
    """A call without side effects: of a function, or, if `call` is a string, of that method of `args[0]`."""

    call: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


Value = Step | Attribute | Constant | Expr


@dataclass(frozen=True)
class Recording:
    """All that a model did in one run.

    Attributes:
        steps: in order, the placeholders first.
        output: what the model returned, with values for what was computed.
        scopes: the module calls that happened, also those without a step of their own.
        outcome: what the run gave; None if nothing was run.
    """

    steps: tuple[Step, ...]
    output: Any
    scopes: frozenset[Scope]
    outcome: Outcome | None = None


class UnrecordableError(Exception):
    """Raised while recording when the innermost module does something that a graph cannot hold.

    Attributes:
        reason: what it does, as the end of a sentence that begins with the module.
        whole: what has to stay whole, for now None if that is the innermost module or method.
        instead_of: what was kept whole in vain.
        source: the line that does it, if the run has gone on from there; else it is in the traceback.
        more: what else the same run has shown.
    """

    def __init__(self, reason: str, whole: "Whole | None" = None, instead_of: "Whole | None" = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.whole = whole
        self.instead_of = instead_of
        self.source = ""
        self.more: tuple[UnrecordableError, ...] = ()


class NumberReadError(UnrecordableError):
    """Raised when a number that depends on data is read.

    The recording is lost, but the run can go on with the number, to see what else would be lost.

    Attributes:
        number: what was read: a number, or a structure of numbers.
    """

    def __init__(self, reason: str, number: Any) -> None:
        super().__init__(reason)
        self.number = number


LAYOUT = frozenset({"size", "numel", "stride", "storage_offset", "is_same_size"})
"""Methods of tensors that tell how they lie in memory, whatever numbers are in them."""


def is_data(value: Any) -> bool:
    """Whether numbers behind a value depend on inputs, parameters, buffers or chance."""
    if isinstance(value, Step):
        return value.data
    if isinstance(value, Expr):
        return any(is_data(arg) for arg in value.args) and value.call not in LAYOUT
    return isinstance(value, Attribute)


def is_ragged(value: Any) -> bool:
    """Whether sizes behind a value depend on such numbers."""
    if isinstance(value, Step):
        return value.ragged
    return isinstance(value, Expr) and any(is_ragged(arg) for arg in value.args)


def varies(value: Any) -> bool:
    """Whether inputs had a part in a value, if only by their sizes."""
    if isinstance(value, Step):
        return value.varies
    return isinstance(value, Expr) and any(varies(arg) for arg in value.args)


def is_input(value: Any) -> bool:
    """Whether a value is an input of the model, or a part of one."""
    while isinstance(value, Expr) and value.call in (operator.getitem, getattr):
        value = value.args[0]
    return isinstance(value, Step) and value.op == "placeholder"


def may_change(fact: Expr) -> bool:
    """Whether a comparison is of different things, one of which another run may change."""
    operands = {identity(arg) for arg in fact.args}
    return len(operands) > 1 and any(varies(arg) for arg in fact.args)


def identity(value: Any) -> Hashable:
    """What expressions of numbers have in common if they compute the same from the same."""
    if isinstance(value, Expr):
        return value.call, tuple(identity(arg) for arg in value.args)
    return tuple(map(identity, value)) if isinstance(value, list) else value


def root(value: Any) -> Step | None:
    """The step that a value is a part of, or None."""
    while isinstance(value, Expr) and value.args:
        value = value.args[0]
    return value if isinstance(value, Step) else None
