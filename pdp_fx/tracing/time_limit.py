"""Ending work of Python's that takes too long, such as a loop that counts down from a number below 0."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from pdp_fx.tracing.source import is_users

_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep

_ASK_AGAIN = 0.01
_SEND_AGAIN = 1.0
"""Seconds until it is tried again to end the work, if that was not at the model's code, and if it was."""


class TooLongError(BaseException):
    """Raised in work that takes longer than it may, past what catches errors and tries again."""


@contextmanager
def time_limit(seconds: float) -> Generator[None, None, None]:
    """Raise `TooLongError` in the model's code that runs inside the block if it takes longer.

    Elsewhere, as where something is put back that was replaced, it is not raised, nor in a call of C.
    """
    thread, ended, sent = threading.get_ident(), threading.Event(), threading.Event()

    def end() -> None:
        wait = seconds
        while not ended.wait(wait):
            at_models_code = _is_at_models_code(thread)
            if at_models_code:
                sent.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TooLongError)
                )
            wait = _SEND_AGAIN if at_models_code else _ASK_AGAIN

    timer = threading.Thread(target=end, daemon=True)
    timer.start()
    try:
        yield
    finally:
        ended.set()
        timer.join()
        if sent.is_set():
            # The error may be still to come.
            time.sleep(0.01)


def _is_at_models_code(thread: int) -> bool:
    """Whether a thread runs code of the model's, and no function of Python's or torch's that it calls."""
    frame = sys._current_frames().get(thread)
    filename = "" if frame is None else frame.f_code.co_filename
    of_python = filename.startswith(_PYTHON) and _INSTALLED not in filename
    return frame is not None and is_users(filename) and not of_python
