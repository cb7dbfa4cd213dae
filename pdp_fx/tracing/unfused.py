"""Attention without torch's fused path for inference."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def unfused_attention() -> Generator[None, None, None]:
    """Let layers of `torch.nn` compute as they do in training.

    The fused path looks at the numbers of a padding mask, hides the parts that channels go through, and
    leaves zeros where a sentence is padded; elsewhere it gives the same, up to rounding.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
