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

LOOKS_AT_MASK = "_detect_is_causal_mask"
"""The function of `torch.nn.modules.transformer` by which it looks at masks."""

_looks_at_mask = getattr(transformer, LOOKS_AT_MASK)


# Around every call that is recorded: two attributes, set by hand, cost a fifth of what `replaced` does.
@contextmanager
def compiling(active: bool) -> Generator[None, None, None]:
    """Let `torch.compiler.is_compiling()` answer this inside the block."""
    before = torch.compiler._is_compiling_flag, getattr(transformer, LOOKS_AT_MASK)
    torch.compiler._is_compiling_flag = active
    setattr(transformer, LOOKS_AT_MASK, _does_not_look if active else _looks_at_mask)
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before[0]
        setattr(transformer, LOOKS_AT_MASK, before[1])


def _does_not_look(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
