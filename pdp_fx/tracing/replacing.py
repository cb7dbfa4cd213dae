"""Replacing an attribute of a class or module for a while."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Generator[None, None, None]:
    """Let an attribute have this value inside the block."""
    inherited = name not in vars(owner)
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
