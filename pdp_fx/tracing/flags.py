"""Which modules' training flags the code of a model reads, and where.

What a module does in one mode only mostly goes by its own flag, but it may ask another for its flag, as in
``F.dropout(x, 0.5, self.drop.training)``, or be told by its caller. Where it asks several, the recordings of
the two modes do not show what it does if they differ.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from pdp_fx.tracing.source import is_ours, is_users
from pdp_fx.tracing.steps import InexactError, Recording

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

ONE_MODE = "decide together what happens in training, and have to be in one mode"
"""What the graph says of modules that are not, where the model does what neither recording shows."""


class MixedModesError(InexactError):
    """The graph does not do what the model does when some of its modules are in the other mode.

    Args:
        model: as for `InexactError`.
        problem: as for `InexactError`.
        together: the modules whose flags the model reads in one place.
    """

    def __init__(self, model: str, problem: str, together: tuple[str, ...]) -> None:
        super().__init__(model, problem)
        self.together = together


def is_blind(model: nn.Module, *recordings: Recording) -> bool:
    """Whether no code of a model can tell its mode, by a flag or by what a `train` of its own sets."""
    return not _sets_more(model) and not any(each.flags for each in recordings)


def leaves_modes_to_torch(model: nn.Module, *recordings: Recording) -> bool:
    """Whether no code but torch's can tell the mode of a model; that makes no plain numbers of sizes."""
    return not _sets_more(model) and not any(each.asks_mode for each in recordings)


def _sets_more(model: nn.Module) -> bool:
    return any("train" in vars(part) or type(part).train is not nn.Module.train for part in model.modules())


def turn(model: nn.Module, path: str) -> None:
    """Put a part of a model, or of its graph module, into the other mode."""
    part = model.get_submodule(path)
    mode = not part.training
    for module in part.modules():
        module.training = mode


@contextmanager
def noting_flags(recorder: Recorder) -> Generator[None, None, None]:
    """Note the reads of training flags inside the block, by the module that runs."""

    def read(module: nn.Module) -> bool:
        if "training" not in vars(module):
            raise AttributeError  # A scripted module keeps it elsewhere.
        path, on = recorder.paths.get(id(module)), vars(module)["training"]
        reader = sys._getframe(1).f_code.co_filename
        if path is not None and not recorder.inside and not is_ours(reader):
            recorder.flags.setdefault(recorder.scope.path, set()).add((path, on))
            recorder.asks_mode |= is_users(reader)
        return on

    def write(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode

    nn.Module.training = property(read, write)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del nn.Module.training
