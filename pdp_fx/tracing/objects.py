"""Callables that let a graph refer to what users define: autograd functions, objects, and methods."""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function

from pdp_fx.ops.explicit import twin
from pdp_fx.tracing.relinking import relink
from pdp_fx.tracing.shells import is_shell


def new_of(kind: Any) -> Callable[[type], Any]:
    """What makes an empty object of a class: the class's own ``__new__`` if that is no Python code."""
    return object.__new__ if isinstance(kind.__new__, FunctionType) else kind.__new__


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
        made = new_of(self.kind)(self.kind)
        for name, value in (*attributes.items(), *self.fixed):
            object.__setattr__(made, name, value)
        return made


@dataclass(frozen=True)
class Fill:
    """A function that makes a record that is also a mapping, with its items in an order of their own.

    Attributes:
        kind: the class, whose constructor would put them in the order of its fields.
    """

    kind: type

    @property
    def __name__(self) -> str:
        return f"fill_{self.kind.__name__}"

    def __call__(self, items: Mapping[str, Any]) -> Any:
        made = self.kind()
        for key, item in items.items():
            setattr(made, key, item)
            made[key] = item
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
        named = self.thing if isinstance(self.thing, type) else type(self.thing)
        return f"the_{named.__name__}"

    def __call__(self) -> Any:
        return self.thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


@dataclass(frozen=True)
class DrawNumber:
    """A function that draws a number outside torch and gives it as a tensor: 0-dim, float64, on the CPU.

    Attributes:
        home: the Python module of the function that draws.
        name: its name.
    """

    home: str
    name: str

    @property
    def __name__(self) -> str:
        return f"draw_{self.name}"

    @property
    def function(self) -> Callable[..., float]:
        """The function that draws."""
        return getattr(importlib.import_module(self.home), self.name)

    def __call__(self, *args: Any) -> torch.Tensor:
        return torch.tensor(self.function(*args), dtype=torch.float64, device="cpu")


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


@dataclass(frozen=True)
class AsSubclass:
    """`Tensor.as_subclass` as a function of one argument, since a graph cannot hold the class.

    Attributes:
        kind: the subclass of `torch.Tensor`.
    """

    kind: type[torch.Tensor]

    @property
    def __name__(self) -> str:
        return f"as_{self.kind.__name__}"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(self.kind)


@functools.cache
def subclass_of(kind: type[torch.Tensor]) -> AsSubclass:
    """The one `AsSubclass` of a class, so that two recordings hold the same."""
    return AsSubclass(kind)


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
    """A method of the traced model, or of a module inside it, as a module of its graph.

    The model is not a submodule: its parameters and layers are those of the graph module already. `join` lets
    the method run on those, so that modes, casts and moves of the graph module reach it.

    Args:
        model: the model.
        path: the path of the module whose method it is; empty for the model itself.
        method: the name of the method.
        uses: the names of the parameters and buffers that it was seen to use.

    Attributes:
        layers: the paths of layers that run in this method only.
    """

    def __init__(self, model: nn.Module, path: str, method: str, uses: frozenset[str]) -> None:
        super().__init__()
        vars(self)["_joined"] = _Joined(model)
        self.path = path
        self.method = method
        self.uses = uses
        self.layers: tuple[str, ...] = ()
        self.training = model.training

    @property
    def owner(self) -> nn.Module:
        """The object whose method it is: a module of the model, or one with its class and attributes."""
        return self._joined.model.get_submodule(self.path)

    @property
    def _joined(self) -> "_Joined":
        return vars(self)["_joined"]

    def join(self, tree: nn.Module) -> None:
        """Run the method from now on with the layers, parameters and buffers of ``tree``.

        Args:
            tree: the graph module, which has those of the model under the same names.
        """
        vars(self)["_joined"] = _Joined.of(self._joined.model, tree)

    def owner_with(self, tree: nn.Module, uses: Iterable[str]) -> nn.Module:
        """An object of the model's class with those tensors and layers of ``tree`` that methods use.

        Args:
            tree: as in `join`.
            uses: the names of the tensors that the methods use.
        """
        named = {**dict(tree.named_parameters()), **dict(tree.named_buffers())}
        return _Joined.of(self._joined.model, tree, {id(named[name]) for name in uses if name in named}).model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, in the mode that the graph module is in."""
        model = self._joined.in_mode(self.training)
        return getattr(model.get_submodule(self.path), self.method)(*args, **kwargs)

    def extra_repr(self) -> str:
        """The name of the method."""
        return self.method


@dataclass(frozen=True, eq=False)
class _Joined:
    """A model whose layers and tensors are those of a graph module.

    Attributes:
        model: an object of the model's class; as long as nothing is joined, the model itself.
        shells: the modules inside it that are not the graph module's own, each with the one it stands beside.
    """

    model: nn.Module
    shells: tuple[tuple[nn.Module, nn.Module], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, tree: nn.Module, used: AbstractSet[int] | None = None) -> "_Joined":
        """The model on the layers and tensors of ``tree``, or on those that are used, by their ids."""
        made: dict[int, tuple[nn.Module, nn.Module]] = {}
        swaps: dict[nn.Module, nn.Module] = {}
        hollows: list[nn.Module] = []

        def joined(module: nn.Module, own: nn.Module) -> nn.Module:
            if id(module) in made:
                return made[id(module)][0]
            if own is not tree and not is_shell(own):
                if own is not module:
                    swaps[module] = own
                return own
            # Its tables are its own: hooks that the method registers are not to show on the user's model.
            other = swaps[module] = twin(module)
            made[id(module)] = other, own
            vars(other).update({name: vars(own)[name] for name in _TENSORS})
            inside = {
                name: child if child is None else _own(own, name, child)
                for name, child in module._modules.items()
            }
            if used is not None:
                for name in ("_parameters", "_buffers"):
                    vars(other)[name] = {
                        key: each for key, each in vars(own)[name].items() if id(each) in used
                    }
            vars(other)["_modules"] = {
                name: child if child is None else part(module._modules[name], child)
                for name, child in inside.items()
            }
            return other

        def part(module: nn.Module | None, own: nn.Module) -> nn.Module:
            module = own if module is None else module
            return joined(module, own) if used is None or needed(own) else hollow(module)

        def hollow(module: nn.Module) -> nn.Module:
            # A method may ask whether there is a part, or for a number that it holds. No tensor is in it.
            if module not in swaps:
                other = swaps[module] = twin(module)
                for table in ("_parameters", "_buffers"):
                    vars(other)[table] = dict.fromkeys(vars(module)[table])
                vars(other)["_modules"] = {
                    name: child if child is None else hollow(child) for name, child in module._modules.items()
                }
                hollows.append(other)
            return swaps[module]

        def needed(layer: nn.Module) -> bool:
            inside = {id(tensor) for tensor in (*layer.parameters(), *layer.buffers())}
            return not inside or not inside.isdisjoint(used or ())

        root = joined(model, tree)
        relink((*(other for other, _ in made.values()), *hollows), swaps)
        return cls(root, tuple(pair for pair in made.values() if pair[0] is not root))

    def in_mode(self, training: bool) -> nn.Module:
        """The model with itself in one mode and each module inside it in the graph module's."""
        self.model.training = training
        for module, own in self.shells:
            module.training = own.training
        return self.model


def _own(tree: nn.Module, name: str, other: nn.Module) -> nn.Module:
    """The submodule of this name, or another module if there is none."""
    found = tree._modules.get(name)
    return other if found is None else found


_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def find_own_layers(tree: nn.Module, graph: fx.Graph) -> None:
    """Note for each method kept whole which layers it uses that a graph reaches in no other way.

    Args:
        tree: the modules of the graph module; the methods are among them.
        graph: its graph.
    """
    methods = [module for module in tree.modules() if isinstance(module, MethodOf)]
    if not methods:
        return
    reached = {
        id(module)
        for node in graph.nodes
        if node.op in ("get_attr", "call_module")
        for module in _on_the_way(tree, str(node.target))
    }
    layers = [
        (path, [f"{path}.{name}" for name, _ in layer.named_parameters()])
        for path, layer in _layers(tree, "")
        if id(layer) not in reached
    ]
    for method in methods:
        method.layers = tuple(path for path, names in layers if not method.uses.isdisjoint(names))


def _on_the_way(tree: nn.Module, target: str) -> Iterator[nn.Module]:
    """The modules on the way from the root of a tree to a module or a tensor."""
    found: Any = tree
    for name in target.split("."):
        found = getattr(found, name)
        if isinstance(found, nn.Module):
            yield found


def _layers(tree: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a tree that are no empty shells, outermost only, with their paths."""
    for name, child in tree.named_children():
        inner = f"{path}.{name}" if path else name
        if is_shell(child):
            yield from _layers(child, inner)
        else:
            yield inner, child


def join_methods(tree: nn.Module) -> None:
    """Let the methods kept whole in a graph module run on its own modules and tensors."""
    for module in tree.modules():
        if isinstance(module, MethodOf):
            module.join(tree)
