"""Computing in float16 and bfloat16 on CPUs, of which many take some hundred times as long as in float32."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SLOW = {getattr(torch.ops.aten, name) for name in ("convolution", "mm", "addmm", "bmm", "baddbmm")}


class WidenedHalf(TorchDispatchMode):
    """Has operators that are slow in 16 bits compute in float32, and rounds their results to the dtype given.

    That is what a model and its graph are compared in where only dtypes matter, not how these add up.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, in float32 if it is a slow one that is given 16 bits on a CPU."""
        kwargs = kwargs or {}
        half = (
            next(filter(_is_half, (*args, *kwargs.values())), None) if func.overloadpacket in _SLOW else None
        )
        if half is None:
            return func(*args, **kwargs)
        wide = lambda each: each.float() if _is_half(each) else each  # noqa: E731
        result = func(*map(wide, args), **{key: wide(arg) for key, arg in kwargs.items()})
        return result.to(half.dtype)


_HALF = torch.float16, torch.bfloat16


def _is_half(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.dtype in _HALF and given.device.type == "cpu"
