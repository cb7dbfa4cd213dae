"""Attention without torch's fused path for inference."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def unfused_attention() -> Generator[None, None, None]:
    """Let the attention layers of `torch.nn` compute in eval mode as they do in training mode.

    The fused path looks at the numbers in a padding mask, hides the operations that channels go through, and
    returns zeros at padded positions; elsewhere its results are the same up to rounding.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
