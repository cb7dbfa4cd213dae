"""Weights that a module which is kept whole, or a hook of a layer, reads without calling the layer.

A mask stands between a layer and its weight, so code that takes ``self.layer.weight`` would get the weight
without its mask.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pdp_fx.tracing.expressions import definition
from pdp_fx.tracing.functions import METADATA, SIZES, name_of, only_looks
from pdp_fx.tracing.source import is_users

READS_RAW = (
    "a module that is kept whole, or a hook, reads {} without calling its layer, or calls it with another "
    "tensor"
)
"""What is said of such a weight, by its name."""


class RawReads(TorchFunctionMode):
    """Notes the parameters that are passed to functions by other code than that of a layer.

    Args:
        wholes: the modules that are kept whole, which is where it looks.
        layers: the layers inside them, and others, in whose hooks it looks.
        parameters: those that it looks for.
    """

    def __init__(
        self,
        wholes: Collection[nn.Module],
        layers: Collection[nn.Module],
        parameters: Iterable[nn.Parameter],
    ) -> None:
        super().__init__()
        self.found: dict[int, nn.Parameter] = {}
        self._watched = {*wholes, *layers}
        self._wanted = frozenset(map(id, parameters))
        self._layers = frozenset(layers)
        self._own = {layer: dict(layer.named_parameters(recurse=False)) for layer in layers}
        # Whether each of the modules that run is a layer, and at its own code.
        self._running: list[bool] = []

    def run(self, call: Callable[[], Any]) -> dict[int, nn.Parameter]:
        """Call something, and return the parameters found, by their ids."""
        handles: list[Any] = []
        for module in self._watched:
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(self._begin))
            handles.append(layer.register_forward_hook(self._end, prepend=True, always_call=True))
        try:
            with self:
                call()
        finally:
            for handle in handles:
                handle.remove()
        return self.found

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(False)

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        self._running[-1] = True
        for name, parameter in self._own[layer].items():
            # As `torch.func.functional_call` lends it others.
            if layer._parameters.get(name) is not parameter and id(parameter) in self._wanted:
                self.found[id(parameter)] = parameter

    def _end(self, layer: nn.Module, inputs: Any, result: Any) -> None:
        self._running[-1] = False

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        kwargs = kwargs or {}
        looks = name in SIZES or only_looks(name, len(args) + len(kwargs))
        if self._running and not self._running[-1] and not looks:
            for given in (*args, *kwargs.values()):
                for each in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(each, nn.Parameter) and id(each) in self._wanted:
                        self.found[id(each)] = each
        return func(*args, **kwargs)


def named_in_code(
    whole: nn.Module, layers: Collection[nn.Module], start: str = "forward"
) -> list[nn.Parameter]:
    """The parameters of layers that the code of a module names, as in ``linear(x, self.layer.weight)``.

    A run shows only those of the branches that it takes.

    Args:
        whole: the module, or the object whose method runs.
        layers: the layers in question.
        start: the method that is called first; those that it names are looked into, too.
    """
    named: dict[str, list[nn.Parameter]] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            named.setdefault(name, []).append(parameter)
    found = dict[int, nn.Parameter]()
    for part in whole.modules() if named else ():
        if part in layers:
            continue
        for node in _attributes_read(type(part), start if part is whole else "forward"):
            value = _value(part, node) if node.attr in named else None
            known = isinstance(value, torch.Tensor)
            found |= {id(p): p for p in named.get(node.attr, ()) if p is value or not known}
    return list(found.values())


@lru_cache(maxsize=4096)
def _attributes_read(kind: type, start: str) -> tuple[ast.Attribute, ...]:
    """The attributes that a method of a user's class reads for more than their size and the like.

    Those that the methods which it names read are among them.
    """
    found: list[ast.Attribute] = []
    todo, seen = [start], {start}
    while todo:
        method = getattr(kind, todo.pop(), None)
        code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
        function = definition(code) if code is not None and is_users(code.co_filename) else None
        if function is None:
            continue
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
        asked = {id(node.value) for node in nodes if node.attr in METADATA | SIZES}
        read = [node for node in nodes if isinstance(node.ctx, ast.Load) and id(node) not in asked]
        found += read
        new = {node.attr for node in read if inspect.isfunction(getattr(kind, node.attr, None))} - seen
        seen |= new
        todo += new
    return tuple(found)


def _value(owner: nn.Module, node: ast.expr) -> Any:
    """What an attribute of ``self`` is now, as in ``self.layer.weight``; None if that is not known."""
    if isinstance(node, ast.Name):
        return owner if node.id == "self" else None
    if not isinstance(node, ast.Attribute):
        return None
    holder = _value(owner, node.value)
    tables = (vars(holder), holder._parameters, holder._modules) if isinstance(holder, nn.Module) else ()
    return next((table[node.attr] for table in tables if node.attr in table), None)
