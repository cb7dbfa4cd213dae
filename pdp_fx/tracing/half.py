"""Computing in float16 on CPUs, which convolve and multiply matrices in it up to a hundred times slower."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SLOW = {getattr(torch.ops.aten, name) for name in ("convolution", "mm", "addmm", "bmm", "baddbmm")}


class WidenedHalf(TorchDispatchMode):
    """Has operators that are slow in float16 compute in float32, and rounds their results to float16.

    That is what a model and its graph are compared in where only dtypes matter, not how float16 adds up.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, in float32 if it is a slow one that is given float16 on a CPU."""
        kwargs = kwargs or {}
        if func.overloadpacket not in _SLOW or not any(map(_is_half, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        wide = lambda each: each.float() if _is_half(each) else each  # noqa: E731
        return func(*map(wide, args), **{key: wide(arg) for key, arg in kwargs.items()}).half()


def _is_half(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.dtype is torch.float16 and given.device.type == "cpu"
