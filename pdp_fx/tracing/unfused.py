"""Attention and recurrent layers without torch's fused paths for inference."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def unfused_recurrence() -> Generator[None, None, None]:
    """Let an LSTM on a CPU compute by the operations that channels go through, not as one."""
    backend: Any = torch.backends.mkldnn
    fast = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = fast
