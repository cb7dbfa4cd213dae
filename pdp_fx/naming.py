"""Names for what is added to a module."""

from __future__ import annotations

from torch import nn


def free_name(owner: nn.Module, name: str) -> str:
    """``name``, with as many underscores behind it as it takes to be no attribute of ``owner`` yet."""
    while hasattr(owner, name):
        name += "_"
    return name
