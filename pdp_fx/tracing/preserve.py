"""Undoing all that runs of a user's model change.

A forward pass may update BatchNorm statistics, draw random numbers, fill caches and set attributes. All of
that is put back, whether or not the run succeeds: training flags, attributes, the contents of buffers and of
plain lists and dicts that modules hold, the random number generators (`generators`), and whether gradients
are on.
"""

import operator
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from pdp_fx.tracing.generators import generators_restored
from pdp_fx.tracing.restoring import blocks_ended
from pdp_fx.tracing.structure import OF_TORCH, are_equal

# Hooks are in an OrderedDict, caches in anything.
_CONTAINERS = (dict, list, set, deque)

Values = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of what it held."""


class _Parameters:
    """The parameters that an `unwritten` block keeps.

    Attributes:
        watched: those that runs may write to.
        written: those that a run has written to.
    """

    def __init__(self, values: Values) -> None:
        self.watched = values
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put_back(self) -> None:
        """Put back those that were written to."""
        self.written |= {id(pair[0]): pair for pair in _put_back(self.watched)}


_PARAMETERS: ContextVar[_Parameters | None] = ContextVar("parameters", default=None)
"""Those of the innermost `unwritten` block."""

Changes = dict[nn.Module, list[str]]
"""The names of attributes by the module that holds them."""

_CHANGES: ContextVar[Changes | None] = ContextVar("changes", default=None)
"""Those of the innermost `noting_changes` block."""


@contextmanager
def preserved(*models: nn.Module) -> Generator[None, None, None]:
    """Restore the models and the random number generators at the end, also after an error."""
    modules = {id(module): module for model in models for module in model.modules()}
    saved = [_Saved(module) for module in modules.values()]
    # Should one not be restored, the others are.
    with generators_restored(), ExitStack() as stack, blocks_ended():
        if (parameters := _PARAMETERS.get()) is not None:
            stack.callback(parameters.put_back)
        for item in saved:
            stack.callback(item.restore)
        yield


@contextmanager
def unwritten(model: nn.Module) -> Generator[None, None, None]:
    """Restore the values of a model's parameters at the end, since runs may write to them.

    An embedding with ``max_norm`` does so, and code that clamps or normalises weights before it uses them.
    Inside the block, `preserved` restores them, too. Nested blocks share one copy.
    """
    if _PARAMETERS.get() is not None:
        yield
        return
    kept = tuple((tensor, tensor.detach().clone()) for tensor in model.parameters() if not tensor.is_meta)
    outer = _PARAMETERS.set(_Parameters(kept))
    try:
        yield
    finally:
        _PARAMETERS.reset(outer)
        _put_back(kept)


def all_is_written() -> None:
    """Declare that later runs will write to no parameters but those that runs so far have written to.

    The other parameters are then compared at the end only, and not after each run.
    """
    if (parameters := _PARAMETERS.get()) is not None:
        parameters.watched = tuple(parameters.written.values())


@contextmanager
def noting_changes() -> Generator[Changes, None, None]:
    """Collect the attributes, other than buffers and parameters, that runs inside the block change."""
    changes: Changes = {}
    outer = _CHANGES.set(changes)
    try:
        yield changes
    finally:
        _CHANGES.reset(outer)


class _Saved:
    """One module as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.attributes = dict(vars(module))
        tables = [item for item in self.attributes.items() if isinstance(item[1], _CONTAINERS)]
        self.contents = [(name, table, table.copy()) for name, table in tables if table]
        # Most of the dozen tables of a module.
        self.empty = {name: table for name, table in tables if not table}
        self.buffers = [
            (buffer, buffer.detach().clone()) for buffer in module._buffers.values() if buffer is not None
        ]
        self.gradients = [
            (tensor, tensor.requires_grad)
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and tensor.is_leaf
        ]

    def restore(self) -> None:
        state = vars(self.module)
        if self.module.training != self.training:
            # All that most runs change; a scripted module keeps it elsewhere.
            self.module.training = self.training
        if not _identical(state, self.attributes):
            self._note(*(name for name in {**state, **self.attributes} if self._is_other(name)))
            state.clear()
            state.update(self.attributes)
        for name, table, content in self.contents:
            if not _same_content(table, content):
                self._note(name)
                _refill(table, content)
        if any(self.empty.values()):
            filled = [name for name, table in self.empty.items() if table]
            self._note(*filled)
            for name in filled:
                self.empty[name].clear()
        _put_back(self.buffers)
        for tensor, wanted in self.gradients:
            if not tensor.is_leaf and not tensor._is_view():
                # A run has written what has a history to it.
                tensor.detach_()
            if tensor.requires_grad != wanted and tensor.is_leaf:
                tensor.requires_grad_(wanted)

    def _is_other(self, name: str) -> bool:
        return vars(self.module).get(name) is not self.attributes.get(name)

    def _note(self, *names: str) -> None:
        changes = _CHANGES.get()
        own = [name for name in names if name not in OF_TORCH]
        if changes is not None and own:
            noted = changes.setdefault(self.module, [])
            noted += [name for name in own if name not in noted]


def _same_content(container: Any, content: Any) -> bool:
    return container == content if isinstance(container, set) else _identical(container, content)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _identical(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if not all(map(operator.is_, container, content)):
        return False
    return isinstance(container, list | deque) or all(map(operator.is_, container.values(), content.values()))


def _put_back(values: Values) -> Values:
    """Restore the tensors whose values have changed, and return these."""
    changed = [pair for pair in values if not are_equal(*pair)]
    with torch.no_grad():
        for tensor, value in changed:
            if tensor.shape == value.shape:
                tensor.copy_(value)
            else:
                tensor.data = value.clone()
    return changed
