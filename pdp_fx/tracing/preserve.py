"""Undoing all that runs of a user's model change.

A forward pass may update BatchNorm statistics, draw random numbers, fill caches and set attributes. All of
that is put back, whether or not the run succeeds: training flags, attributes, the contents of buffers, of
plain lists and dicts that modules hold, and of what is in these (`held`), the random number generators
(`generators`), and whether gradients are on.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from pdp_fx.tracing.generators import generators_restored
from pdp_fx.tracing.held import CONTAINERS, Kept, content_of, held_by, refill, same_content
from pdp_fx.tracing.restoring import blocks_ended
from pdp_fx.tracing.structure import OF_TORCH, are_equal

Values = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of what it held."""


class _Block:
    """What an `unwritten` block keeps: parameters, and what modules hold.

    Attributes:
        values: all parameters.
        watched: those that runs may write to.
        written: those that a run has written to.
        held: what the modules hold.
    """

    def __init__(self, values: Values, held: list[Kept]) -> None:
        self.values = self.watched = values
        self.held = held
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put_back(self) -> None:
        """Put back those that were written to."""
        self.written |= {id(pair[0]): pair for pair in _put_back(self.watched)}


_KEPT: ContextVar[_Block | None] = ContextVar("kept", default=None)
"""What the innermost `unwritten` block keeps."""

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
        if (kept := _KEPT.get()) is not None:
            stack.callback(kept.put_back)
        for thing in held_by(modules.values()) if kept is None else kept.held:
            stack.callback(_put_back_held, thing)
        for item in saved:
            stack.callback(item.restore)
        yield


@contextmanager
def unwritten(model: nn.Module) -> Generator[None, None, None]:
    """Restore the values of a model's parameters at the end, since runs may write to them.

    An embedding with ``max_norm`` does so, and code that clamps or normalises weights before it uses them.
    Inside the block, `preserved` restores them, too, and what the modules of this model held at its start.
    Nested blocks share one copy.
    """
    if _KEPT.get() is not None:
        yield
        return
    kept = tuple((tensor, tensor.detach().clone()) for tensor in model.parameters() if not tensor.is_meta)
    outer = _KEPT.set(_Block(kept, held_by(model.modules())))
    try:
        yield
    finally:
        _KEPT.reset(outer)
        _put_back(kept)


def written_now() -> Mapping[int, torch.Tensor]:
    """Copies of the parameters that runs have written to, in their present state, by the ids of these.

    They are those of the innermost `unwritten` block, as far as runs that are over have shown them.
    """
    kept = _KEPT.get()
    written = {} if kept is None else kept.written
    return {key: tensor.detach().clone() for key, (tensor, _) in written.items()}


def all_is_written() -> None:
    """Declare that later runs will write to no parameters but those that runs so far have written to.

    The other parameters are then compared at the end only, and not after each run.
    """
    if (kept := _KEPT.get()) is not None:
        kept.watched = tuple(kept.written.values())


@contextmanager
def anything_may_be_written() -> Generator[None, None, None]:
    """Have all parameters compared after each run inside the block, which may be in another setting."""
    if (kept := _KEPT.get()) is None:
        yield
        return
    outer, kept.watched = kept.watched, kept.values
    try:
        yield
    finally:
        kept.watched = outer


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
        tables = [item for item in self.attributes.items() if isinstance(item[1], CONTAINERS)]
        self.contents = [(name, table, content_of(table)) for name, table in tables if table]
        # Most of the dozen tables of a module.
        self.empty = {name: table for name, table in tables if not table}
        self.buffers = [
            (buffer, buffer.detach().clone()) for buffer in module._buffers.values() if buffer is not None
        ]
        self.leaves = [
            (tensor, tensor.requires_grad, tensor.grad, None if tensor.grad is None else tensor.grad.clone())
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None and tensor.is_leaf
        ]

    def restore(self) -> None:
        state = vars(self.module)
        if self.module.training != self.training:
            # All that most runs change; a scripted module keeps it elsewhere.
            self.module.training = self.training
        if not same_content(state, self.attributes):
            _note(self.module, *(name for name in {**state, **self.attributes} if self._is_other(name)))
            state.clear()
            state.update(self.attributes)
        for name, table, content in self.contents:
            if not same_content(table, content):
                _note(self.module, name)
                if table is self.module._buffers:
                    # A graph keeps what is in a buffer, but not whether anything is.
                    changed = (each for each in table if (table[each] is None) != (content.get(each) is None))
                    _note(self.module, *(f"{each} (None at times)" for each in changed))
                refill(table, content)
        if any(self.empty.values()):
            filled = [name for name, table in self.empty.items() if table]
            _note(self.module, *filled)
            for name in filled:
                self.empty[name].clear()
        _put_back(self.buffers)
        for tensor, wanted, gradient, value in self.leaves:
            if not tensor.is_leaf and not tensor._is_view():
                # A run has written what has a history to it.
                tensor.detach_()
            if tensor.requires_grad != wanted and tensor.is_leaf:
                tensor.requires_grad_(wanted)
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if gradient is not None and value is not None:
                _put_back(((gradient, value),))

    def _is_other(self, name: str) -> bool:
        return vars(self.module).get(name) is not self.attributes.get(name)


def _note(module: nn.Module, *names: str) -> None:
    changes = _CHANGES.get()
    own = [name for name in names if name not in OF_TORCH]
    if changes is not None and own:
        noted = changes.setdefault(module, [])
        noted += [name for name in own if name not in noted]


def _put_back_held(thing: Kept) -> None:
    if thing.put_back():
        _note(thing.module, thing.name)


def _put_back(values: Values) -> Values:
    """Restore the tensors whose values have changed, and return these."""
    changed = [pair for pair in values if not are_equal(*pair)]
    with torch.no_grad():
        for tensor, value in changed:
            if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                tensor.copy_(value)
            else:
                tensor.data = value.clone()
    return changed
