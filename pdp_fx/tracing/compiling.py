"""Telling a model that it is being compiled.

Some models look at values only in eager mode ("is the attention mask all ones? then skip it"), after asking
`torch.compiler.is_compiling()`. `nn.TransformerEncoder` and `nn.TransformerDecoder` do not ask: they compare
each mask with the causal one, to choose a faster kernel of attention. Here, being compiled also keeps them
from comparing, so that they use the kernel that reads the mask.
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
