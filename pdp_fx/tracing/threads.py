"""Noticing that a model hands work to other threads, which no recording sees.

A tensor that another thread has made is one of unknown origin. A number that it leaves behind is a constant
of the graph, which only runs on other inputs show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pdp_fx.tracing.replacing import replaced

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder


@contextmanager
def noting_threads(recorder: Recorder) -> Generator[None, None, None]:
    """Note in the recorder that the model starts a thread, or gives work to one of a pool."""
    with (
        replaced(threading.Thread, "start", _noted(recorder, threading.Thread.start)),
        replaced(ThreadPoolExecutor, "submit", _noted(recorder, ThreadPoolExecutor.submit)),
    ):
        yield


def _noted(recorder: Recorder, hand_over: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder.uses_threads = True
        return hand_over(*args, **kwargs)

    return noted
