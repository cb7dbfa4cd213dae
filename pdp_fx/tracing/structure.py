"""Nested containers and objects around tensors: iterating over their parts, copying and classifying them."""

import copy
import dataclasses
import enum
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from random import Random
from types import CellType, MemberDescriptorType
from typing import Any, cast

import numpy as np
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._pytree import tree_map

BASE_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    type(...),
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch._ops.OpOverload,
)

OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; none of them is what a forward keeps for its next call."""


class LiveShape(tuple[int, ...]):
    """A shape whose `numel` is a live number; that of a `torch.Size` is a plain one."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return LiveShape(found) if isinstance(place, slice) else found

    def numel(self) -> int:
        """The product of the sizes."""
        return reduce(operator.mul, self, 1)


def is_namedtuple(value: object) -> bool:
    """Whether a value is an instance of a `collections.namedtuple` class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_structseq(value: object) -> bool:
    """Whether a value is a tuple with named places, as built-in functions give: `max`, `topk`."""
    return isinstance(value, tuple) and hasattr(value, "n_sequence_fields")


def is_record(value: object) -> bool:
    """Whether a value is an instance of a dataclass that its fields can rebuild (ModelOutput classes are)."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
    )


def is_remade(value: object) -> bool:
    """Whether calling the class of a record with its fields makes an equal record.

    It does not if the class computes something in ``__post_init__``, or if the record has further attributes.
    A record that is also a mapping, such as a ModelOutput, does that only to store its fields as items.
    """
    if not is_record(value):
        return False
    names = {field.name for field in dataclasses.fields(cast(Any, value))}
    state = attributes(value)
    return isinstance(value, Mapping) or (not hasattr(value, "__post_init__") and state.keys() <= names)


def record_fields(value: Any) -> dict[str, Any]:
    """The fields of a record that do not hold their default."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: item for name, item in fields.items() if item is not defaults[name]}


def children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a container or object: how to reach each (`item` or `attribute`), its key, the part."""
    if isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield "item", index, part
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield "item", key, part
    elif is_object(value):
        for name, part in attributes(value).items():
            yield "attribute", name, part


def is_object(value: object) -> bool:
    """Whether a value has attributes of its own, and is no class, module, tensor or function.

    An object that can be called counts if nothing but Python code makes it, so that its attributes are all.
    """
    if isinstance(value, type | torch.nn.Module | torch.Tensor):
        return False
    if callable(value) and type(value).__new__ is not object.__new__:
        return False
    return hasattr(value, "__dict__") or bool(slots(type(value)))


def is_opaque(value: object) -> bool:
    """Whether a value is no tensor and cannot be looked into, as functions, classes and sets."""
    looked_into = (*BASE_TYPES, slice, torch.Tensor, np.generic, tuple, list, Mapping)
    return not isinstance(value, looked_into) and not is_object(value)


def opaque_parts(value: Any) -> Iterator[Any]:
    """All such values and Python's generators in a structure; objects with tensors are not looked into."""
    seen = set[int]()
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, BASE_TYPES) or id(part) in seen:
            continue
        seen.add(id(part))
        if is_opaque(part) or isinstance(part, Random):
            yield part
        if not is_object(part) or is_record(part) or not has_tensors(part):
            todo += [inner for _, _, inner in children(part)]


def equals_copies(thing: object) -> bool:
    """Whether a thing equals its copies, as functions and classes do, so that a graph can ask for it."""
    return not isinstance(thing, Random) and bool(copy.deepcopy(thing) == thing)


def attributes(value: object) -> dict[str, Any]:
    """The attributes that an object holds itself, in its ``__dict__`` and in slots."""
    names = [name for name in slots(type(value)) if hasattr(value, name)]
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


def defaults(kind: type) -> dict[str, Any]:
    """The plain values that objects of a class have unless they are given others: attributes of the class."""
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, BASE_TYPES) and not name.startswith("__")
    }


@cache
def slots(kind: type) -> tuple[str, ...]:
    """The names of all slots of a class and those that it is derived from."""
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    )


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a structure, depth first; objects are looked into once each, lists wherever they are."""
    yield from _leaves(value, (torch.Tensor,), set())


def tags(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that code has given a tensor of no class of its own, beside those that it hides."""
    named = vars(tensor) if type(tensor) is torch.Tensor else {}
    return {name: value for name, value in named.items() if not name.startswith("_")}


def hiding_tensors(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Parts of a structure with tensors that are no parts of it: sets, functions, modules and the like."""
    seen = set() if seen is None else seen
    if isinstance(value, (torch.Tensor, type, *BASE_TYPES)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        held: list[Any] = [*value.parameters(), *value.buffers()]
    elif isinstance(value, set | frozenset | deque):
        held = list(value)
    elif callable(value) and not is_object(value):
        cells = getattr(value, "__closure__", None) or ()
        held = [*attributes(value).values(), getattr(value, "__self__", None)]
        held += [cell.cell_contents for cell in cells if cell != CellType()]
    else:
        held = []
    if has_tensors(held):
        yield value
    for _, _, part in children(value):
        yield from hiding_tensors(part, seen)


def are_one(part: Any, other: Any) -> bool:
    """Whether a part of a structure is another one, or the same number, text or the like."""
    if isinstance(part, BASE_TYPES):
        # A `torch.Size` makes its numbers anew each time.
        return type(part) is type(other) and bool(part == other)
    return part is other


def arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """All NumPy arrays in a structure."""
    yield from _leaves(value, (np.ndarray,), set())


def tensors_and_numbers(value: Any) -> Iterator[torch.Tensor | complex]:
    """All tensors and numbers in a structure, in the same order."""
    yield from _leaves(value, (torch.Tensor, int, float, complex), set())


def plain_leaves(value: Any) -> list[Any]:
    """All in a structure that is neither a tensor nor a container: numbers, texts and the like."""
    return list(_leaves(value, BASE_TYPES, set()))


def place_of_number(value: Any, around: frozenset[int] = frozenset()) -> str | None:
    """How to reach the first number in a structure, such as ``.cache.layers[0].size``; None without one."""
    if isinstance(value, bool | int | float):
        return ""
    if isinstance(value, BASE_TYPES) or id(value) in around:
        return None
    for how, key, part in children(value):
        place = place_of_number(part, around | {id(value)})
        if place is not None:
            named = how == "attribute" or is_record(value)
            return (f".{key}" if named else f"[{key!r}]") + place
    return None


def objects(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """All objects in a structure, as `is_object` has it."""
    seen = set() if seen is None else seen
    if isinstance(value, BASE_TYPES) or id(value) in seen:
        return
    seen.add(id(value))
    if is_object(value):
        yield value
    for _, _, part in children(value):
        yield from objects(part, seen)


def flat_tensors(arguments: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or results of an operator, which holds them in lists at most."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if not isinstance(arguments, list | tuple):
        return []
    return [tensor for part in arguments for tensor in flat_tensors(part)]


def in_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that a tensor is stored as: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.values(), tensor.ccol_indices(), tensor.row_indices()
    return (tensor,)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of the values of a sparse one; asking for it is seen by no function mode."""
    with torch._C.DisableTorchFunction():
        return in_memory(tensor)[0].untyped_storage()


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`torch.equal`, of sparse tensors, too."""
    parts, others = in_memory(one), in_memory(other)
    return one.shape == other.shape and len(parts) == len(others) and all(map(torch.equal, parts, others))


def kind_of_tensor(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The properties that a tensor must share with another to take its place."""
    return tensor.shape, tensor.dtype, tensor.device


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in a structure."""
    return next(tensors(value), None) is not None


def _leaves(value: Any, kinds: tuple[type, ...], seen: set[int]) -> Iterator[Any]:
    if isinstance(value, kinds):
        yield value
        return
    if isinstance(value, BASE_TYPES) or id(value) in seen:
        return
    seen.add(id(value))
    for _, _, part in children(value):
        yield from _leaves(part, kinds, seen)
    if isinstance(value, tuple | list | Mapping):
        # A graph that returns a list twice may return two lists; only one that holds itself has no end.
        seen.remove(id(value))


def fresh_copy(value: Any) -> Any:
    """A deep copy whose tensors are detached leaves; a tensor that occurs twice becomes two."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(fresh_copy(part) for part in value)
    if type(value) is dict:
        return {key: fresh_copy(part) for key, part in value.items()}
    return joint_copy(value)


def joint_copy(value: Any) -> Any:
    """A deep copy whose tensors are detached leaves; a tensor that occurs twice stays one."""
    return copy.deepcopy(value, {id(tensor): fresh_copy(tensor) for tensor in tensors(value)})


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A structure with other leaves, of which the tensors in objects are some; the objects are copied."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) or not has_tensors(leaf):
            return change(leaf)
        return copy.deepcopy(leaf, {id(tensor): change(tensor) for tensor in tensors(leaf)})

    return tree_map(changed, value)


def as_base(value: Any) -> Any:
    """A numpy scalar as the Python number it is; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def changeable(value: Any) -> Any:
    """The value, or a copy with plain lists and dicts in the place of those of fx."""
    if isinstance(value, immutable_dict):
        return {key: changeable(item) for key, item in value.items()}
    if isinstance(value, immutable_list):
        return [changeable(item) for item in value]
    return value
