"""What else than tensors a model reads of the objects with tensors that it is given.

A batch of graphs may hold how many there are, or a flag, beside its tensors. No function shows that a model
reads such a thing, and there may be many more that it does not read, which differ from call to call. So the
classes of these objects note during a run what is read of them, and the graph checks that.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from pdp_fx.tracing.given import Tensors, Uses, place_of, plain_parts
from pdp_fx.tracing.replacing import replaced
from pdp_fx.tracing.shapes import Facts, reached
from pdp_fx.tracing.sizes import Live
from pdp_fx.tracing.source import is_ours
from pdp_fx.tracing.steps import Expr, Step, Value
from pdp_fx.tracing.structure import (
    BASE_TYPES,
    attributes,
    equals_copies,
    has_tensors,
    is_object,
    is_opaque,
    is_record,
    opaque_parts,
    tensors_and_numbers,
)

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

_WAYS: dict[str, Any] = {
    "__getattribute__": getattr,
    "__getattr__": getattr,
    "__getitem__": operator.getitem,
    "__contains__": operator.contains,
}
"""The methods by which code reads something of an object, and what does the same in a graph."""

_ALL = ("__dict__", "__getstate__")
"""The attributes by which code reads all others, as to copy an object."""

_IMMUTABLE = 1 << 8
"""The flag of the classes that cannot be given other methods, such as `types.SimpleNamespace`."""


class AttributeReads:
    """The objects with tensors among the inputs of a run, and what it has read of them.

    Args:
        recorder: of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._places: dict[int, tuple[Any, Value]] = {}
        self._records: set[int] = set()
        self._origins: dict[tuple[Any, ...], Value | None] = {}
        self._seen: set[Hashable] = set()
        self._facts: Facts = []
        self._within = [self._facts]

    def watch(self, value: Value, example: Any, seen: set[int] | None = None, inside: bool = False) -> None:
        """Note from now on what is read of the objects with tensors in an input, and of what they hold.

        Args:
            value: how to reach a part of the input.
            example: the part.
            seen: the ids of the parts that were looked into.
            inside: whether an object with tensors holds it.
        """
        seen = set[int]() if seen is None else seen
        if isinstance(example, BASE_TYPES) or id(example) in seen:
            return
        seen.add(id(example))
        if is_object(example) and not isinstance(example, list | tuple | Mapping):
            watched = inside or has_tensors(example)
            if is_record(example) and not inside:
                self._records.add(id(example))
            else:
                inside = watched
            if watched and not type(example).__flags__ & _IMMUTABLE:
                self._places[id(example)] = example, value
            elif watched:
                self._facts += self._parts_of(example, value)
                for name, part in attributes(example).items():
                    self._facts += self._tensors_of(Expr(getattr, (value, name)), part)
        for inner, part in reached(value, example):
            self.watch(inner, part, seen, inside)

    @contextmanager
    def noting(self) -> Generator[None, None, None]:
        """Note what is read inside the block."""
        kinds = {type(thing) for thing, _ in self._places.values()}
        ways = [(kind, name, getattr(kind, name)) for kind in kinds for name in _WAYS if hasattr(kind, name)]
        with ExitStack() as stack:
            for kind, name, plain in ways:
                stack.enter_context(replaced(kind, name, self._noted(name, plain)))
            yield

    def facts(self, given: Mapping[str, Any], uses: Uses) -> Facts:
        """What was read that the inputs had at first, and how to reach it.

        Args:
            given: the inputs as they were before the run, by name. What the model has itself written into
                them is no fact of theirs.
            uses: what the run uses; there is no fact of tensors without which it fails by itself.
        """
        found = {path_of(value): (value, fact) for value, fact in self._facts}
        return [
            (value, fact)
            for path, (value, fact) in found.items()
            if not uses.needs(self._origins.get(path)) and _holds(value, fact, given)
        ]

    def may_have_read(self, value: Value) -> bool:
        """Whether the run has read a part of the inputs, or that is part of no object."""
        return not is_attribute(value) or place_of(value) in self._seen

    def _tensors_of(self, value: Value, found: Any) -> Facts:
        """The facts that something read is a tensor, or that there are tensors in a container."""
        facts: Facts = []
        for inner, tensor in _in_containers(value, found):
            fact, origin = Expr(torch.is_tensor, (inner,)), self._recorder.origins.known(tensor)
            self._origins[path_of(fact)] = origin
            self._seen.add(place_of(origin))
            facts.append((fact, True))
        return facts

    def _noted(self, way: str, plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def read(thing: Any, key: Any) -> Any:
            caller = sys._getframe(1)
            if not self._is_read(thing, key) or is_ours(caller.f_code.co_filename):
                return plain(thing, key)
            if not self._recorder.inside:
                return self._read(way, plain, thing, key, caller)
            # A part that is kept whole reads at each call.
            found = plain(thing, key)
            self._tensors_of(Expr(_WAYS[way], (self._places[id(thing)][1], key)), found)
            return found

        return read

    def _is_read(self, thing: Any, key: Any) -> bool:
        """Whether a key is of something that a thing which is watched holds, and not of its class."""
        known = self._places.get(id(thing))
        if known is None or known[0] is not thing:
            return False
        if not isinstance(key, str | int) or isinstance(key, Live):
            return False
        return not str(key).startswith("__") or key in _ALL

    def _read(
        self, way: str, plain: Callable[[Any, Any], Any], thing: Any, key: Any, caller: FrameType
    ) -> Any:
        """Read something of a thing, and note it or, if it is nothing plain, what was read to get it."""
        value, reach, before = self._places[id(thing)][1], _WAYS[way], len(self._recorder.steps)
        with self._apart() as inner:
            try:
                found = plain(thing, key)
            except AttributeError:
                # `__getattr__` is called where `__getattribute__` fails, if there is one.
                if way == "__getattr__" or (reach is getattr and not hasattr(type(thing), "__getattr__")):
                    inner.append((Expr(hasattr, (value, key)), False))
                raise
            # An object that looks a tensor up in a dict does not go by all that the dict holds.
            mixed = len(self._within) == 2 or not self._is_own(caller)
            given = mixed or isinstance(found, torch.Tensor)
            held = self._tensors_of(Expr(reach, (value, key)), found) if given else []
            if len(self._recorder.steps) == before:
                if id(thing) not in self._records:
                    inner[:] = self._facts_of(reach, thing, value, key, found, mixed) or inner
                inner += held
            return found

    @contextmanager
    def _apart(self) -> Generator[Facts, None, None]:
        """Keep what is noted inside the block in a list, whose facts are added to the others at its end."""
        inner: Facts = []
        self._within.append(inner)
        try:
            yield inner
        finally:
            self._within.pop()
            self._within[-1].extend(inner)

    def _is_own(self, caller: FrameType) -> bool:
        """Whether code that reads something is a method of a thing that is watched."""
        names = caller.f_code.co_varnames[: caller.f_code.co_argcount]
        return bool(names) and id(caller.f_locals.get(names[0])) in self._places

    def _facts_of(self, reach: Any, thing: Any, value: Value, key: Any, found: Any, mixed: bool) -> Facts:
        """The facts to check of what was read, with all in a structure with tensors if that is ``mixed``."""
        if not mixed and (key in _ALL or has_tensors(found)):
            return []
        if key in _ALL:
            return self._parts_of(thing, value)
        if is_opaque(found) and found is not attributes(thing).get(key):
            return []  # A method.
        return self._plain(Expr(reach, (value, key)), found)

    def _parts_of(self, thing: Any, value: Value) -> Facts:
        """The facts to check of all attributes of a thing."""
        parts = attributes(thing).items()
        return [fact for name, part in parts for fact in self._plain(Expr(getattr, (value, name)), part)]

    def _plain(self, value: Value, part: Any) -> Facts:
        """The facts to check of a part of a thing; none of a part that is watched itself."""
        if id(part) in self._places or any(isinstance(leaf, Live) for leaf in tensors_and_numbers(part)):
            return []
        unknown = next((each for each in opaque_parts(part) if not equals_copies(each)), None)
        if unknown is not None:
            why = f"reads a {type(unknown).__name__} of an input, and a graph knows no other"
            self._recorder.refuse(why)
        return plain_parts(value, part, self._recorder.findings.ordered, frozenset(self._places))


def _in_containers(value: Value, found: Any) -> Tensors:
    """How to reach a tensor or those in containers, but not in objects, and these."""
    if isinstance(found, torch.Tensor):
        return [(value, found)]
    parts = reached(value, found) if isinstance(found, list | tuple | Mapping) else ()
    return [each for inner, part in parts for each in _in_containers(inner, part)]


def is_attribute(value: Value) -> bool:
    """Whether a part of an input is an attribute of an object, or inside one."""
    return isinstance(value, Expr) and (value.call is getattr or is_attribute(value.args[0]))


def path_of(value: Value) -> tuple[Any, ...]:
    """What tells apart how values are reached."""
    return (*path_of(value.args[0]), value.call, *value.args[1:]) if isinstance(value, Expr) else (value,)


def _holds(value: Value, fact: Any, given: Mapping[str, Any]) -> bool:
    """Whether a fact holds of inputs."""
    try:
        found = _of(value, given)
        wanted = _of(fact, given)
        return type(found) is type(wanted) and bool(found == wanted)
    except Exception:  # noqa: BLE001 code of the model's may raise anything
        return False


def _of(value: Any, given: Mapping[str, Any]) -> Any:
    """What a value is for inputs."""
    if isinstance(value, Step):
        return given[str(value.target)]
    if isinstance(value, Expr) and callable(value.call):
        return value.call(*(_of(part, given) for part in value.args))
    return value
