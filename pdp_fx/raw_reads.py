"""Weights that a module which is kept whole, or a hook of a layer, reads without calling the layer.

A mask stands between a layer and its weight, so code that takes ``self.layer.weight`` would get the weight
without its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from pdp_fx.tracing.functions import SIZES, name_of, only_looks

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
