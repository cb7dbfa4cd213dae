"""Telling a model that it is being compiled.

Some models look at values only while they run eagerly ("is the attention mask all ones? then skip it") and
ask `torch.compiler.is_compiling()` first.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def compiling(active: bool) -> Generator[None, None, None]:
    """Let `torch.compiler.is_compiling()` answer this inside the block."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = active
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
