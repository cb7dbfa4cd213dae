"""Iterators that a model keeps in attributes, such as ``itertools.cycle(steps)``; it must not move them on.

Tracing runs a model many times and undoes what each run has changed, but nothing moves an iterator back.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

from torch import nn

from pdp_fx.errors import TraceError
from pdp_fx.tracing.replacing import entries
from pdp_fx.tracing.source import source_line


class _Unmoved:
    """Stands for an iterator, and refuses to be moved on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoReturn:
        raise TraceError(
            f"the model moves on the iterator {self._name} at each call ({source_line()}), which nothing can "
            "move back after a trial run; keep a list and the place in it, as a buffer"
        )


@contextmanager
def unmoved_iterators(model: nn.Module) -> Generator[None, None, None]:
    """Refuse that the model moves on an iterator of Python's in one of its attributes, inside the block."""
    kept: list[tuple[dict[str, Any], str, object]] = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
                kept.append((vars(module), name, _Unmoved(f"{path}.{name}" if path else name)))
    with entries(kept):
        yield
