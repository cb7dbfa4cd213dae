"""Callables that let a graph refer to what users define: autograd functions, objects, and methods."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd import Function


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
        vars(made).update(attributes)
        vars(made).update(self.fixed)
        return made


@dataclass(frozen=True, eq=False)
class Held:
    """A function without arguments that returns an object of the model's, such as its configuration.

    Attributes:
        thing: the object, which holds no tensors.
    """

    thing: Any

    @property
    def __name__(self) -> str:
        return f"the_{type(self.thing).__name__}"

    def __call__(self) -> Any:
        return self.thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


@dataclass(frozen=True)
class Apply:
    """An autograd function as a function of its own name.

    Attributes:
        kind: the subclass of `torch.autograd.Function`.
    """

    kind: type[Function]

    @property
    def __name__(self) -> str:
        return self.kind.__name__

    def __call__(self, *args: Any) -> Any:
        return self.kind.apply(*args)


@functools.cache
def apply_of(kind: type[Function]) -> Apply:
    """The one `Apply` of an autograd function, so that two recordings hold the same."""
    return Apply(kind)


@dataclass(frozen=True, eq=False)
class Bound:
    """A method of an object that a graph cannot hold as an argument, as a function of its own name.

    Attributes:
        thing: the object, whose class defines no module.
        method: the name of the method.
    """

    thing: Any
    method: str

    @property
    def __name__(self) -> str:
        return self.method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.thing, self.method)(*args, **kwargs)


class MethodOf(nn.Module):
    """A method of the traced model itself, as a module of its graph.

    The model is not a submodule: its parameters and layers are those of the graph module already.

    Args:
        model: the model.
        method: the name of the method.
    """

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        vars(self)["_model"] = (model,)
        self.method = method
        self.training = model.training

    @property
    def model(self) -> nn.Module:
        """The model whose method it is."""
        return vars(self)["_model"][0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, in the mode that the graph module is in."""
        model = self.model
        before, model.training = model.training, self.training
        try:
            return getattr(model, self.method)(*args, **kwargs)
        finally:
            model.training = before

    def extra_repr(self) -> str:
        """The name of the method."""
        return self.method
