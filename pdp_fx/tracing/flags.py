"""Which modules' training flags the code of a model reads, and where.

What a module does in one mode only mostly goes by its own flag, but it may ask another for its flag, as in
``F.dropout(x, 0.5, self.drop.training)``, or be told by its caller.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from pdp_fx.tracing.recorder import Recorder
from pdp_fx.tracing.source import is_ours


@contextmanager
def noting_flags(recorder: Recorder) -> Generator[None, None, None]:
    """Note the reads of training flags inside the block, by the module that runs."""

    def read(module: nn.Module) -> bool:
        if "training" not in vars(module):
            raise AttributeError  # A scripted module keeps it elsewhere.
        path, on = recorder.paths.get(id(module)), vars(module)["training"]
        if path is not None and not recorder.inside and not is_ours(sys._getframe(1).f_code.co_filename):
            recorder.flags.setdefault(recorder.scope.path, set()).add((path, on))
        return on

    def write(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode

    nn.Module.training = property(read, write)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del nn.Module.training
