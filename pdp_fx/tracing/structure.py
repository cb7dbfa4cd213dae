"""Containers around tensors: taking them apart, and writing them as graph arguments."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

Visit = Callable[[torch.Tensor], torch.Tensor]
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


def is_namedtuple(value: object) -> bool:
    """Whether a value is an instance of a `collections.namedtuple` class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_record(value: object) -> bool:
    """Whether a value is an instance of a dataclass that its fields can rebuild (ModelOutput classes are)."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
    )


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
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module | torch.Tensor):
        if callable(value):
            return
        for name, part in vars(value).items():
            yield "attribute", name, part


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a structure, depth first; objects are looked into, too."""
    yield from _tensors(value, set())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, BASE_TYPES) or id(value) in seen:
        return
    seen.add(id(value))
    for _, _, part in children(value):
        yield from _tensors(part, seen)


def fresh_copy(value: Any) -> Any:
    """A deep copy whose tensors are detached leaves, so that a run cannot change the original."""
    memo: dict[int, Any] = {}
    for tensor in tensors(value):
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.deepcopy(value, memo)


def as_base(value: Any) -> Any:
    """A numpy scalar as the Python number it is; anything else unchanged."""
    return value.item() if isinstance(value, np.generic) else value
