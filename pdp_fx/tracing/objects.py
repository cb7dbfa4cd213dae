"""Objects of users' own classes that a model returns, such as key-value caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Build:
    """A function that makes an object of a class out of its attributes, without calling its constructor.

    Attributes:
        kind: the class.
        fixed: names and values of attributes that a graph cannot hold as arguments, such as classes.
    """

    kind: type
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def __name__(self) -> str:
        return f"build_{self.kind.__name__}"

    def __call__(self, attributes: Mapping[str, Any]) -> Any:
        made = object.__new__(self.kind)
        for name, value in attributes.items():
            setattr(made, name, value)
        for name, value in self.fixed:
            setattr(made, name, value)
        return made
