"""Following sizes that are computed in many steps, each from the one before, such as a counter in a loop."""

import sys
from collections.abc import Generator
from contextlib import contextmanager

from pdp_fx.errors import TraceError

FRAMES = 5_000
"""How deep calls may be nested while a model is traced; a size takes four for each of its steps."""


@contextmanager
def deep_recursion() -> Generator[None, None, None]:
    """Let calls inside the block be nested deeper than Python's default.

    Raises:
        TraceError: that is not deep enough.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, FRAMES))
    try:
        yield
    except RecursionError as err:
        raise TraceError(
            "the model computes a size in more steps, each from the one before, than can be followed; "
            "compute it at once, as in n + steps in the place of a loop that adds 1"
        ) from err
    finally:
        sys.setrecursionlimit(before)
