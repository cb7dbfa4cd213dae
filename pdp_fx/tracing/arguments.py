"""Encoding the arguments and results of calls: tensors and live numbers become values (`steps.Value`)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pdp_fx.tracing.generators import is_own
from pdp_fx.tracing.objects import Build, Fill, Held
from pdp_fx.tracing.origins import Origins
from pdp_fx.tracing.sizes import Live, Session, YieldingFloat, plain, value_of
from pdp_fx.tracing.steps import Expr, UnrecordableError
from pdp_fx.tracing.structure import (
    BASE_TYPES,
    as_base,
    attributes,
    has_tensors,
    is_namedtuple,
    is_object,
    is_record,
    is_remade,
    is_structseq,
    record_fields,
    tensors_and_numbers,
)


class Arguments:
    """Replaces tensors and live numbers in arguments by values.

    Args:
        origins: finds the values of tensors.
        session: the recording that live numbers must belong to.
    """

    def __init__(self, origins: Origins, session: Session) -> None:
        self._origins = origins
        self._session = session

    def encode(self, arg: Any) -> Any:
        """An argument of a call, with values in the place of tensors and live numbers.

        Raises:
            UnrecordableError: a graph cannot hold it.
        """
        if isinstance(arg, torch.Tensor):
            return self._origins.value(arg)
        if isinstance(arg, Live | YieldingFloat):
            return value_of(arg, self._session)
        known = self._origins.object(arg)
        if known is not None:
            return known
        if isinstance(arg, slice):
            return slice(self.encode(arg.start), self.encode(arg.stop), self.encode(arg.step))
        return self._container(as_base(arg))

    def _container(self, arg: Any) -> Any:
        if isinstance(arg, BASE_TYPES):
            return arg
        if is_namedtuple(arg):
            return Expr(type(arg), tuple(self.encode(part) for part in arg))
        if is_structseq(arg):
            return Expr(type(arg), (tuple(self.encode(part) for part in arg),))
        if isinstance(arg, list):
            return [self.encode(part) for part in arg]
        if isinstance(arg, tuple):
            return tuple(self.encode(part) for part in arg)
        if self._origins.is_kept(arg) and not any(
            isinstance(leaf, torch.Tensor | Live) for leaf in tensors_and_numbers(arg)
        ):
            return Expr(Held(arg), ())
        if isinstance(arg, torch.Generator) and is_own(arg):
            return Expr(Held(arg), ())
        if is_remade(arg):
            return _record(arg, self.encode)
        if isinstance(arg, dict):
            parts = {key: self.encode(part) for key, part in arg.items()}
            return parts if type(arg) is dict else Expr(type(arg), (parts,))
        if has_tensors(arg) or is_record(arg):
            return self._build(arg)
        if isinstance(arg, np.dtype):
            raise UnrecordableError("makes an array of NumPy of a tensor")
        raise UnrecordableError(f"passes a {type(arg).__name__}, which a graph cannot hold")

    def output(self, result: Any) -> Any:
        """The model's result, encoded like an argument; objects of users' classes are taken apart.

        Raises:
            UnrecordableError: a graph cannot hold it.
        """
        try:
            return self.encode(result)
        except UnrecordableError:
            if isinstance(result, (*BASE_TYPES, torch.Tensor)) or callable(result):
                raise
        if is_remade(result):
            return _record(result, self.output)
        if type(result) in (tuple, list):
            return type(result)(self.output(part) for part in result)
        if isinstance(result, dict):
            parts = {key: self.output(part) for key, part in result.items()}
            return parts if type(result) is dict else Expr(type(result), (parts,))
        return self._build(result)

    def _build(self, thing: Any) -> Expr:
        if not is_object(thing):
            raise UnrecordableError(f"passes a {type(thing).__name__}, which a graph cannot hold")
        state: dict[str, Any] = {}
        fixed: list[tuple[str, Any]] = []
        for name, part in attributes(thing).items():
            if callable(part) or isinstance(part, type):
                fixed.append((name, part))
            else:
                state[name] = self.output(part)
        return Expr(Build(type(thing), tuple(fixed)), (state,))


def _record(record: Any, encode: Callable[[Any], Any]) -> Expr:
    """What makes an equal record, whose items, if it has any, are in the same order."""
    fields = record_fields(record)
    if isinstance(record, Mapping) and list(record) != list(fields) and set(record) == set(fields):
        return Expr(Fill(type(record)), ({key: encode(fields[key]) for key in record},))
    return Expr(type(record), (), {key: encode(part) for key, part in fields.items()})


def stripped(arg: Any, original: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The argument with plain numbers in the place of live numbers.

    Args:
        arg: the argument.
        original: gives the objects of which there are copies with live numbers, for these.
    """
    if isinstance(arg, Live | YieldingFloat):
        return plain(arg)
    if isinstance(arg, slice):
        return slice(plain(arg.start), plain(arg.stop), plain(arg.step))
    if isinstance(arg, BASE_TYPES) or not any(
        isinstance(leaf, Live | slice) or original(leaf) is not leaf for leaf in leaves(arg)
    ):
        return arg
    if is_namedtuple(arg):
        return type(arg)(*(stripped(part, original) for part in arg))
    if isinstance(arg, dict):
        return {key: stripped(part, original) for key, part in arg.items()}
    if isinstance(arg, tuple | list):
        return type(arg)(stripped(part, original) for part in arg)
    return original(arg)


def leaves(tree: Any) -> list[Any]:
    """All leaves of nested tuples, lists and dicts."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)]


def all_values(tree: Any) -> list[Any]:
    """All leaves of nested tuples, lists, dicts and slices, such as an encoded argument."""
    found: list[Any] = []
    for leaf in leaves(tree):
        found += (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return found
