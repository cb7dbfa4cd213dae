"""Weights that a module which is kept whole reads without calling the layers that own them.

A mask stands between a layer and its weight, so code that takes ``self.layer.weight`` would get the weight
without its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from pdp_fx.tracing.functions import SIZES, name_of, only_looks


class RawReads(TorchFunctionMode):
    """Notes the layers' parameters that are passed to functions while a module, and none of its layers, runs.

    Args:
        wholes: the modules that are kept whole.
        layers: the layers inside them.
    """

    def __init__(self, wholes: Collection[nn.Module], layers: Collection[nn.Module]) -> None:
        super().__init__()
        self.found: dict[int, nn.Parameter] = {}
        self._watched = [*wholes, *layers]
        self._owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self._layers = frozenset(layers)
        self._running: list[nn.Module] = []

    def run(self, call: Callable[[], Any]) -> dict[int, nn.Parameter]:
        """Call something, and return the parameters found, by their ids."""
        handles: list[Any] = []
        for module in self._watched:
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                call()
        finally:
            for handle in handles:
                handle.remove()
        return self.found

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        self._running.remove(module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = name_of(func)
        kwargs = kwargs or {}
        looks = name in SIZES or only_looks(name, len(args) + len(kwargs))
        if self._running and self._running[-1] not in self._layers and not looks:
            for given in (*args, *kwargs.values()):
                for each in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(each, nn.Parameter) and id(each) in self._owned:
                        self.found[id(each)] = each
        return func(*args, **kwargs)
