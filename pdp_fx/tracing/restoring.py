"""Blocks of gradient modes and of autocast, which an error that leaves them must end, too.

The generated code does so (`standalone.restored_on_errors`). Where a graph is run node by node,
`blocks_ended` does.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import fx

from pdp_fx import standalone
from pdp_fx.standalone import Span
from pdp_fx.tracing.modes import function_of

_CASTING = ("cpu", "cuda")
"""The types of devices whose settings of autocast are restored."""


@contextmanager
def blocks_ended() -> Generator[None, None, None]:
    """Restore gradients and autocast at the end, as a graph leaves them that fails inside of their blocks."""
    gradients, cache, depth = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _open_casts()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _CASTING]
    try:
        yield
    finally:
        torch._C._set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        left = _open_casts() - depth
        for _ in range(left):
            torch.autocast_decrement_nesting()
        if left and not depth:
            # As at the end of the last block: torch keeps the weights that it has cast till then.
            torch.clear_autocast_cache()


def _open_casts() -> int:
    """How many blocks of autocast are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def changed_settings(graph: fx.Graph) -> list[Span]:
    """`standalone.changed_settings` of a graph whose calls may be for one mode only."""
    return standalone.changed_settings(graph, function_of)
