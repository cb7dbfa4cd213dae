"""Telling a model that it is being compiled.

Some models look at values only while they run eagerly ("is the attention mask all ones? then skip it") and
ask `torch.compiler.is_compiling()` first. `nn.TransformerEncoder` and `nn.TransformerDecoder` do not ask:
they compare each mask with the causal one, to tell attention that it may take a faster kernel. Being compiled
includes here that they do not look, and so take the kernel that reads the mask.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules import transformer

from pdp_fx.tracing.replacing import replaced

LOOKS_AT_MASK = "_detect_is_causal_mask"
"""The function of `torch.nn.modules.transformer` by which it looks at masks."""

looks_at_mask = getattr(transformer, LOOKS_AT_MASK)


@contextmanager
def compiling(active: bool) -> Generator[None, None, None]:
    """Let `torch.compiler.is_compiling()` answer this inside the block."""
    looks = _does_not_look if active else looks_at_mask
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = active
    try:
        with replaced(transformer, LOOKS_AT_MASK, looks):
            yield
    finally:
        torch.compiler._is_compiling_flag = before


def _does_not_look(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
