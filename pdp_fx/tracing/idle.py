"""Finding modules without weights that return their input in eval mode, such as stochastic depth."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from pdp_fx.tracing.findings import Findings
from pdp_fx.tracing.leaves import is_leaf, stores_tensors
from pdp_fx.tracing.steps import DIFFERS_BY_MODE, Whole


@contextmanager
def noticing_idle(model: nn.Module, findings: Findings) -> Generator[None, None, None]:
    """Keep modules whole that return their input while the model runs in eval mode, and read their mode.

    Comparing the two recordings would find them, too, but then both would have to be made again.
    """
    candidates = {
        module: path
        for path, module in model.named_modules()
        if path and not is_leaf(module) and _asks_for_mode(module) and not stores_tensors(module)
    }
    idle: dict[nn.Module, bool] = {}

    def notice(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module in candidates:
            idle[module] = idle.get(module, True) and bool(args) and output is args[0]

    handle = register_module_forward_hook(notice)
    try:
        yield
    finally:
        handle.remove()
    for module, passes_on in idle.items():
        if passes_on:
            findings.keep_whole(Whole(candidates[module]), DIFFERS_BY_MODE)


def _asks_for_mode(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "training" in code.co_names
