"""Garbage collection while a model is compiled.

Compiling creates very many small objects, which triggers full collections, and each of these visits every
object of the process. With a few large libraries imported, that takes a third of the whole time.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collecting_new() -> Generator[None]:
    """Let garbage collections inside the block visit only objects that were created there."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
