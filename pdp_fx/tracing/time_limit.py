"""Ending work of Python's that takes too long, such as a loop that counts down from a number below 0."""

import ctypes
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class TooLongError(BaseException):
    """Raised in work that takes longer than it may, past what catches errors and tries again."""


@contextmanager
def time_limit(seconds: float) -> Generator[None, None, None]:
    """Raise `TooLongError` inside the block if it takes longer; a call of C is waited for."""
    thread, late = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def end() -> None:
        late.set()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TooLongError))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if late.is_set():
            # The error may be still to come.
            time.sleep(0.01)
