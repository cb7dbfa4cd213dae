"""The errors of one recording, collected so that a single run finds several parts to keep whole."""

import sys
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from pdp_fx.tracing.blame import to_blame
from pdp_fx.tracing.source import source_line
from pdp_fx.tracing.steps import NumberReadError, UnrecordableError, Whole

MOST = 100
"""After this many reads of numbers that depend on data a run is given up."""


class Failures:
    """The errors of a recorder, remembered even if the model's code catches them.

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
        """Note an error, and return the number with which the run can continue.

        Args:
            err: the error.
            path: the path of the module that runs.

        Raises:
            UnrecordableError: the run cannot continue after this error.
        """
        if isinstance(err, NumberReadError) and len(self.found) < MOST:
            self._note(err, path)
            return err.number
        if not self.found:
            self._note(err, path)
        raise err

    def _note(self, err: UnrecordableError, path: str) -> None:
        err.source = err.source or source_line()
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
