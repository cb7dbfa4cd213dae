"""What a run has shown that a graph cannot hold."""

import sys
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from pdp_fx.tracing.blame import to_blame
from pdp_fx.tracing.source import source_line
from pdp_fx.tracing.steps import NumberReadError, UnrecordableError, Whole

MOST = 100
"""How many numbers a run may read that no graph may read, before it is given up."""


class Failures:
    """The refusals of a recorder, remembered even if the model catches the error.

    Args:
        model: the model that runs.
        paths: the path of each of its modules, by identity.
        tried: what was kept whole before.
    """

    def __init__(self, model: nn.Module, paths: Mapping[int, str], tried: Container[Whole]) -> None:
        self.model = model
        self.paths = paths
        self.tried = tried
        self.found: list[UnrecordableError] = []

    def go_on(self, err: UnrecordableError, path: str) -> Any:
        """The number with which the run goes on, to see what else cannot be recorded.

        Args:
            err: what was met.
            path: of the module that runs.

        Raises:
            UnrecordableError: it is nothing that a run could go on from.
        """
        if isinstance(err, NumberReadError) and len(self.found) < MOST:
            err.source = source_line()
            self._note(err, path)
            return err.number
        if not self.found:
            self._note(err, path)
        raise err

    def _note(self, err: UnrecordableError, path: str) -> None:
        if err.whole is None:
            module = self.model.get_submodule(path)
            err.whole = to_blame(sys._getframe(), module, path, self.paths, self.tried)
        self.found.append(err)

    def check(self, cause: Exception | None = None) -> None:
        """Raise the first error, with the others in it; nothing if there is none."""
        if self.found:
            first, *more = self.found
            first.more = tuple(more)
            raise first from (None if cause is first else cause)
