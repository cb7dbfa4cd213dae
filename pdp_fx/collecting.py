"""Garbage collection while a model is compiled.

Compiling makes very many small objects, and so sets off full collections, each of which looks at
every object of the process. With a few large libraries imported, that is a third of all the time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collecting_new() -> Generator[None]:
    """Let collections inside the block look only at objects that were made there."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
