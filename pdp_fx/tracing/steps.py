"""The data types of a recording: steps in the order they happened, and values that refer to them.

A *step* is one thing the model did: a torch function, a method of a tensor, a leaf module. A *value* says
where something comes from: a step's result, a parameter by name, or an expression over other values, such as
"axis 1 of the size of that result, divided by 2". Expressions are not steps: they are written into the graph
only where a step uses them, so two recordings of one model differ in their steps only if the model acted
differently.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch

from pdp_fx.errors import TraceError
from pdp_fx.tracing.objects import DrawNumber
from pdp_fx.tracing.outcome import Outcome

DIFFERS_BY_MODE = "acts differently in training mode"
"""The reason for keeping a module whole that has no weights and whose code follows the mode, not the data."""

DRAWS_OUTSIDE = "draws random numbers outside torch"
"""The reason for keeping a module whole that draws by NumPy or Python."""


TRUTH = torch.ops.aten._assert_scalar.default
"""The check of a tensor's truth, which a graph reads by `item`: torch compiles and exports that."""

CHECKS = (torch._assert, TRUTH)
"""The targets of steps and nodes that check something, of sizes and of tensors."""


@dataclass(frozen=True)
class Scope:
    """One call of a module.

    Attributes:
        path: the module's path; empty for the model itself.
        count: the number of this call among all calls of the path, from 1; 0 for the model.
        parent: the call inside which it happens; None for the model.
    """

    path: str
    count: int = 0
    parent: "Scope | None" = None


@dataclass(frozen=True)
class Whole:
    """A module, method or function whose calls are one step each: the tracer does not look inside.

    Attributes:
        path: the path of the module; empty for the model itself and for functions.
        method: the name of a method of that module, or of the function; empty for the whole module.
        holder: for a function, the Python module or the class that it is looked up in; else None.
    """

    path: str
    method: str = ""
    holder: ModuleType | type | None = None

    def __str__(self) -> str:
        if self.holder is not None:
            return f"{self.holder.__name__}.{self.method}"
        return f"{self.path or 'the model'}.{self.method}" if self.method else self.path


class How(Enum):
    """How a model's code goes by a size."""

    COMPARED = "compared with another, or with 0 or 1"
    COMPARED_WITH_NUMBER = "compared with a plain number above 1"
    MADE_PLAIN = "made a plain number"


@dataclass(eq=False, repr=False)
class Step:
    """One recorded call.

    Attributes:
        op: `placeholder`, `call_function`, `call_method` or `call_module`, as in `torch.fx`.
        target: as in `torch.fx`; for a method that is kept whole, a `call_module` of a `Whole`.
        args: positional arguments, in which values stand for what was computed.
        kwargs: keyword arguments, likewise.
        scope: the module call that it happened in.
        source: the line of the model's code, `file.py:line`.
        data: whether its numbers depend on inputs, parameters, buffers or random numbers, so that no branch
            may depend on them.
        ragged: whether its sizes depend on such numbers.
        varies: whether it depends on inputs, be it on their sizes only.
        changes: the values that it changes in place.
        observed: whether the change is seen by more than the users of its result.
        random: whether it drew random numbers.
        updates: whether it changed running statistics, or other buffers of the module that it calls.
        reason: why it was kept whole, or the empty string.
        reads_numbers: whether it is kept whole and read numbers out of tensors.
        uses: if it is kept whole, the parameters and buffers of the model that it used.
        sized: whether the model reads a size of its result that depends on numbers.
        decides: if it is a check of what the model's code found of sizes: how the code goes by them.
        recomputed: the number, from 1, of the call of `torch.utils.checkpoint` that it is a part of; else 0.
        skipped: the number, from 1, of the choice by random numbers that may skip it; negative if it runs
            only where others are skipped; else 0.
        repairs: whether it computes what goes on where numbers are not finite.
        tried: whether the model goes on if it fails, so that it is done for that alone, too.
        selects: the number, from 1, of the selection that it makes, if the model asks whether that is empty;
            negative if that is of what is False in it; else 0.
        idle: the number of the selection without which it does nothing, since the model leaves it out then;
            else 0.
        returned: whether it reads a number of what code has returned that is not looked into.
        shape: that of its result in the run, if that is one tensor; else None.
        dtype: likewise.
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
    uses: frozenset[str] = frozenset()
    sized: bool = False
    decides: How | None = None
    recomputed: int = 0
    skipped: int = 0
    repairs: bool = False
    tried: bool = False
    selects: int = 0
    idle: int = 0
    returned: bool = False
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def boolean(self) -> bool:
        """Whether its result is one tensor of booleans."""
        return self.dtype == torch.bool

    @property
    def called(self) -> str:
        """The name of the target for messages."""
        return str(getattr(self.target, "__name__", self.target))

    def __repr__(self) -> str:
        # What it is given may be used many times over, and would be written each time.
        return f"<{self.op} {self.called} at {self.source}>"


@dataclass(frozen=True)
class Attribute:
    """A parameter, a buffer or another attribute of the model, by its dotted name."""

    path: str


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that no module owns, made before the model ran or from numbers that the graph does not see."""

    tensor: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """A call without side effects: of a function, or, if `call` is a string, of that method of `args[0]`."""

    call: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def identity(self) -> "_Identity":
        """What it has in common with expressions that are the same computation of the same values."""
        named = tuple((name, identity(arg)) for name, arg in self.kwargs.items())
        form = self.call, tuple(map(identity, self.args)), named
        return _IDENTITIES.setdefault(form, _Identity())

    def __repr__(self) -> str:
        return f"<expression {getattr(self.call, '__name__', self.call)}>"


class _Identity:
    """A computation; there is one of each, so that no two have to be compared part by part."""


_IDENTITIES: WeakValueDictionary[Hashable, _Identity] = WeakValueDictionary()

Value = Step | Attribute | Constant | Expr


@dataclass(frozen=True)
class Draw:
    """A branch of the model on random numbers alone, or on whether all numbers are finite.

    Attributes:
        value: the tensor that it asked for its truth.
        number: that of the value, from 0; several branches may ask for the truth of one.
        place: how many steps came before it.
        scope: the module call that it happened in.
        source: the line of the model's code, `file.py:line`.
        repairs: whether it asks if numbers are finite, and assigns others if not.
    """

    value: Value
    number: int
    place: int
    scope: Scope
    source: str
    repairs: bool


@dataclass(frozen=True)
class Asked:
    """A branch of the model on whether a selection is empty.

    Attributes:
        number: that of the selection, from 1.
        place: how many steps came before it.
        source: the line of the model's code, `file.py:line`.
    """

    number: int
    place: int
    source: str


@dataclass(frozen=True)
class Emptied:
    """A run that was told of some selections that they are empty.

    Attributes:
        numbers: those of the selections.
        source: the line of the model's code that asks about them.
        outcome: that of the run.
    """

    numbers: frozenset[int]
    source: str
    outcome: Outcome


Flags = Mapping[str, frozenset[tuple[str, bool]]]


@dataclass(frozen=True)
class Recording:
    """All that a model did in one run.

    Attributes:
        steps: in order, the placeholders first.
        output: what the model returned, with values for what was computed.
        scopes: all module calls that happened, including those without steps, and which numbers, truth values
            and texts were arguments.
        flags: by the path of the module that ran, whose training flags it read, and what they were.
        asks_mode: whether code outside torch has read one of them.
        asks_rank: the line that asked first how many axes a tensor has; empty if none did.
        outcome: the outcome of the run; None if nothing was run.
        unseen: tensors that no step has made and no module owns: they were there before the run, or another
            thread has made them.
        uses_threads: whether it handed work to other threads.
        draws: where the model branched on random numbers alone or on whether numbers are finite, in order.
        asked: where the model asked whether a selection is empty, in order.
        emptied: runs that were told of some selections that they are.
        added: the steps that were added when the run was over: checks, ahead of all that it does.
        seconds: how long the run took.
        unfollowed: the lines that read the dtype of a tensor of which the graph does not tell what became.
    """

    steps: tuple[Step, ...]
    output: Any
    scopes: Mapping[Scope, tuple[Any, ...]]
    flags: Flags = field(default_factory=dict[str, frozenset[tuple[str, bool]]])
    asks_mode: bool = False
    asks_rank: str = ""
    outcome: Outcome | None = None
    unseen: tuple[torch.Tensor, ...] = ()
    uses_threads: bool = False
    draws: tuple[Draw, ...] = ()
    asked: tuple[Asked, ...] = ()
    emptied: tuple[Emptied, ...] = ()
    added: tuple[Step, ...] = ()
    seconds: float = 0.0
    unfollowed: tuple[str, ...] = ()

    def between(self, branches: Sequence[Draw | Asked]) -> list[list[Step]]:
        """The steps before the first of these, and those behind each; without checks, which are made once."""
        places = [0, *(each.place for each in branches), len(self.steps)]
        return [
            [step for step in self.steps[start:stop] if step.target not in CHECKS]
            for start, stop in zip(places, places[1:], strict=False)
        ]

    @property
    def draws_outside(self) -> bool:
        """Whether a number is drawn from the generator of Python or NumPy."""
        return any(isinstance(step.target, DrawNumber) for step in self.steps)


class InexactError(TraceError):
    """Raised where a graph is discarded because it does not do what the model does.

    Args:
        model: the name of the model's class.
        problem: what it does, as the end of a sentence.
    """

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"the graph of {model} is not exact and was discarded: {problem}")
        self.model, self.problem = model, problem


class UnprovenError(InexactError):
    """Raised where a branch on whether anything is selected may do more than leave work out.

    Args:
        model: as for `InexactError`.
        problem: as for `InexactError`.
        source: the line of the model's code.
    """

    def __init__(self, model: str, problem: str, source: str) -> None:
        super().__init__(model, problem)
        self.source = source


class LostDtypeError(InexactError):
    """Raised where a dtype that the model reads of a tensor has become a constant of the graph."""


class UnrecordableError(Exception):
    """Raised while recording when the innermost module does something that a graph cannot hold.

    Attributes:
        reason: what it does, as the end of a sentence that begins with the module.
        whole: the part to keep whole; None if that is still to be found (`blame.to_blame`).
        instead_of: a part that was kept whole in vain, or None.
        source: the line that does it, if the run has continued after it; else the line is in the traceback.
        more: further errors of the same run.
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

    The recording is useless then, but the run can continue with the number to find further such places.

    Attributes:
        number: what was read: a number, or a structure of numbers.
    """

    def __init__(self, reason: str, number: Any) -> None:
        super().__init__(reason)
        self.number = number


LAYOUT = frozenset({"size", "dim", "numel", "stride", "storage_offset", "is_same_size", "element_size"})
"""Methods of tensors whose result depends on shape, dtype and layout, and not on the numbers in them."""


def is_data(value: Any) -> bool:
    """Whether a value depends on numbers in inputs, parameters, buffers, or on random numbers."""
    origins = _origins(value, lambda expression: not (_is_layout(expression) or _is_unsized(expression)))
    return any(each.data if isinstance(each, Step) else isinstance(each, Attribute) for each in origins)


def is_ragged(value: Any) -> bool:
    """Whether a value depends on sizes that depend on such numbers (`is_data`)."""
    origins = _origins(value, lambda expression: not _is_unsized(expression))
    return any(isinstance(each, Step) and each.ragged for each in origins)


def is_read(value: Any) -> bool:
    """Whether a value is a number that the model reads from a tensor of data, or computed from one."""
    origins = _origins(value, lambda expression: not _is_layout(expression))
    return any(isinstance(each, Step) and each.called == "item" and each.sized for each in origins)


def is_returned(value: Any) -> bool:
    """Whether a value is a number that code has returned which is not looked into, or computed from one."""
    origins = _origins(value, lambda expression: not _is_layout(expression))
    return any(isinstance(each, Step) and each.returned for each in origins)


def _is_layout(value: Expr) -> bool:
    return value.call in LAYOUT


def _is_unsized(value: Expr) -> bool:
    """Whether a value is an attribute of a tensor that says nothing about its size or its numbers."""
    return value.call is getattr and value.args[1] in _UNSIZED


_UNSIZED = ("device", "dtype", "layout", "ndim", "requires_grad")
"""Attributes of a tensor that say nothing about its size or its numbers."""


def varies(value: Any) -> bool:
    """Whether a value depends on inputs, be it on their sizes only."""
    return any(isinstance(each, Step) and each.varies for each in _origins(value))


def is_input(value: Any) -> bool:
    """Whether a value is an input of the model, or a part of one."""
    while isinstance(value, Expr) and value.call in (operator.getitem, getattr):
        value = value.args[0]
    return isinstance(value, Step) and value.op == "placeholder"


def is_given(value: Any) -> bool:
    """Whether a value is a number that is an input of the model, or computed from one."""
    origins = _origins(value)
    return any(isinstance(each, Step) and each.op == "placeholder" and not each.data for each in origins)


def parts_of(tree: Any, into: Callable[[Expr], bool] = lambda _: True) -> Iterator[Any]:
    """All values and other leaves of a structure, and of the expressions in it, each expression once.

    Args:
        tree: the structure.
        into: whether to take an expression apart.
    """
    left, seen = [tree], set[int]()
    while left:
        part = left.pop()
        if isinstance(part, list | tuple):
            left += part
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, slice):
            left += part.start, part.stop, part.step
        elif not isinstance(part, Expr):
            yield part
        elif id(part) not in seen:
            seen.add(id(part))
            yield part
            if into(part):
                left += part.args, part.kwargs


def _origins(value: Any, into: Callable[[Expr], bool] = lambda _: True) -> Iterable[Any]:
    """What a value is computed from: itself, or the leaves of an expression."""
    if not isinstance(value, Expr):
        return (value,)
    return (part for part in parts_of(value, into) if not isinstance(part, Expr))


def selectors(value: Any) -> Iterator[Attribute]:
    """The parameters and buffers on whose numbers a size depends that depends on numbers."""
    left, seen = [value], set[int]()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Attribute):
            yield part
        elif isinstance(part, list | tuple):
            left += part
        elif isinstance(part, Step | Expr):
            selects = isinstance(part, Step) and part.called in ("getitem", "masked_select")
            left += part.args[1:] if selects and not is_ragged(part.args[0]) else part.args
            left += part.kwargs.values()


def identity(value: Any) -> Hashable:
    """A key that two values share if they are the same, or the same computation of the same values."""
    if isinstance(value, Expr):
        return value.identity
    if isinstance(value, dict):
        return tuple((key, identity(part)) for key, part in value.items())
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    return tuple(map(identity, value)) if isinstance(value, list | tuple) else value


def with_steps(change: Callable[[Any], Any], tree: Any, kind: type = Step) -> Any:
    """A structure with each step in it changed, also those that expressions compute with.

    Args:
        change: gives what takes the place of a step.
        tree: the structure.
        kind: what is changed instead of steps.
    """
    made: dict[Expr, Expr] = {}

    def changed(part: Any) -> Any:
        if isinstance(part, kind):
            return change(part)
        if isinstance(part, Expr):
            if part not in made:
                made[part] = Expr(part.call, changed(part.args), changed(part.kwargs))
            return made[part]
        if isinstance(part, slice):
            return slice(changed(part.start), changed(part.stop), changed(part.step))
        if isinstance(part, dict):
            return {key: changed(inner) for key, inner in part.items()}
        return type(part)(map(changed, part)) if type(part) in (tuple, list) else part

    return changed(tree)


def root(value: Any) -> Step | None:
    """The step that a value is a part of, or None."""
    while isinstance(value, Expr) and value.args:
        value = value.args[0]
    return value if isinstance(value, Step) else None
