"""Calling a model on tuples or dicts, comparing outputs, and counting multiply-accumulates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

Arguments = tuple[Any, ...] | dict[str, Any]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def call(model: nn.Module, inputs: Arguments) -> list[Tensor]:
    """All floating-point outputs."""
    result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def in_dtype(inputs: Arguments, dtype: torch.dtype) -> Arguments:
    """The inputs with floating-point tensors in ``dtype``."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, inputs)


def difference(model: nn.Module, other: nn.Module, batches: tuple[Arguments, ...]) -> float:
    """The largest difference of any output relative to its scale; infinite if shapes differ."""
    worst = 0.0
    with torch.no_grad():
        for batch in batches:
            mine, theirs = _drawn_alike(model, batch), _drawn_alike(other, batch)
            if [out.shape for out in mine] != [out.shape for out in theirs]:
                return float("inf")
            for a, b in zip(mine, theirs, strict=True):
                if a.numel():
                    found = float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))
                    worst = max(worst, found) if found == found else float("inf")
    return worst


def _drawn_alike(model: nn.Module, batch: Arguments) -> list[Tensor]:
    """The outputs of a model that may draw random numbers in eval mode, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return call(model, batch)


def verdict(found: float, model: nn.Module) -> str:
    """Whether a difference is rounding in the model's dtype."""
    return "exact" if found <= TOLERANCE[next(model.parameters()).dtype] else "wrong"


GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
"""Products of rows with the matrix of their group, which torch does not count in every version."""


class _Counter(TorchDispatchMode):
    """Adds up torch's own counts; `FlopCounterMode` would hang hooks on modules, which some cannot bear."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        elif func._schema.name in GROUPED:
            # Each row of the data meets one of the matrices.
            self.total += 2 * args[0].numel() * out.shape[-1]
        return out


def mmacs(model: nn.Module, inputs: Arguments) -> float:
    """Millions of multiply-accumulates of all matrix products and convolutions, for one batch."""
    # Fused operations for attention have no count on every device.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _Counter() as counter, torch.no_grad():
            call(model.eval(), inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.total / 2e6
