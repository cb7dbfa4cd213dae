"""What a model asks of the processes that it trains in: whether there are others, how many, and which it is.

A graph keeps the answers of the time when it was traced. No run shows what other answers would lead to, for a
process group cannot be made for a trial, so the graph insists on them. What was traced in a process group may
be used outside of one, as a converted model is, where it does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import distributed

from pdp_fx.tracing.replacing import entries, wherever_named
from pdp_fx.tracing.settings import hold_call, is_users_question

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

_ASKING = {
    "is_initialized": "whether processes work together",
    "get_world_size": "how many processes work together",
    "get_rank": "which of the processes it is",
}
"""Functions of `torch.distributed`, and what they ask."""


@contextmanager
def noting_processes(recorder: Recorder) -> Generator[None, None, None]:
    """Let the graph insist on what the model asks about its processes."""
    if not distributed.is_available():
        yield
        return
    alone = not distributed.is_initialized()
    asking = [(getattr(distributed, name), what) for name, what in _ASKING.items()]
    noting = [(function, _asked(recorder, function, what, alone)) for function, what in asking]
    with entries(wherever_named(noting, map(type, recorder.model.modules()), distributed.__dict__)):
        yield


def _asked(recorder: Recorder, function: Callable[..., Any], what: str, alone: bool) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        asked = not recorder.inside and is_users_question() and not args and not kwargs
        if asked and (recorder.model.training or alone):
            hold_call(recorder, function, (), result, what)
        return result

    return answer
