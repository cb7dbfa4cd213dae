"""Buffers that a model replaces by other tensors, as in ``self.mean = 0.9 * self.mean + x.mean(0)``.

Until the model's forward ends, what it reads of such a buffer is the tensor that it has put there, with its
gradient. A graph keeps the tensor that was there at first, which it overwrites at the end of a run, or before
a part runs that it does not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pdp_fx.tracing.steps import (
    Attribute,
    Constant,
    Expr,
    Scope,
    Step,
    UnrecordableError,
    Whole,
    parts_of,
    with_steps,
)
from pdp_fx.tracing.structure import kind_of_tensor
from pdp_fx.tracing.watch import lies_as, storage_of, version_of

if TYPE_CHECKING:
    from pdp_fx.tracing.recorder import Recorder

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


class Rebinding:
    """The buffers of the model that is recorded, and what it has put in their places so far.

    Args:
        recorder: the recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        modules = list(recorder.model.modules())
        self._first = {(each, name): buffer for each in modules for name, buffer in _held(each).items()}
        self._now = dict(self._first)
        self._versions = {
            place: version_of(first) for place, first in self._first.items() if first is not None
        }
        self._names = {each: tuple(_held(each)) for each in modules}
        self._written: dict[tuple[Place, str], tuple[Scope, torch.Tensor]] = {}

    def note(self, modules: Iterable[nn.Module], scope: Scope) -> None:
        """Note which buffers of some modules are others than before.

        Args:
            modules: the modules.
            scope: the call of a module in which they were replaced, whose mode decides whether they are.

        Raises:
            UnrecordableError: there is one more, or one that is of another kind.
        """
        for module in modules:
            names = self._names.get(module)
            if names is None:
                # What a part that is kept whole adds is its own affair.
                continue
            new = next((name for name in _held(module) if name not in names), None)
            if new is not None:
                why = f"adds a buffer {new} in its forward, which a run before tracing would have added"
                raise UnrecordableError(why, Whole(scope.path))
            for name in names:
                place, now = (module, name), _held(module).get(name)
                before = self._now.get(place, now)
                if now is before:
                    continue
                if before is None or now is None or kind_of_tensor(before) != kind_of_tensor(now):
                    why = f"puts a tensor of another shape, dtype or device into its buffer {name}"
                    if before is None or now is None:
                        why = f"fills or empties its buffer {name}"
                    raise UnrecordableError(why, Whole(scope.path))
                self._now[place] = now
                self._written.pop((place, scope.path), None)
                self._written[place, scope.path] = scope, now

    def overwrite(self, modules: Iterable[nn.Module], before: str = "") -> None:
        """Record that the buffers of some modules are overwritten by what the model has put in their places.

        The modules hold them again after that.

        Args:
            modules: the modules.
            before: the part that is called next and is not looked into; empty at the end of the run.

        Raises:
            UnrecordableError: a part that is kept whole has replaced one, too, or would lose its gradient.
        """
        among = dict.fromkeys(modules)
        self.note(among, self._recorder.scope)
        mine = {key: written for key, written in self._written.items() if key[0][0] in among}
        for (place, path), (_, value) in mine.items():
            called = self._recorder.paths[id(place[0])]
            if self._first[place] is None:
                raise UnrecordableError(
                    f"replaces the buffer {place[1]} of {called}, as that does", Whole(path)
                )
            if before and value.requires_grad:
                why = f"gives {before} a tensor with gradients as buffer {place[1]}"
                raise UnrecordableError(why, Whole(path))
        if not before:
            self._keep_what_was_read(place for place, _ in mine)
        memories = {storage_of(first) for place, _ in mine if (first := self._first[place]) is not None}
        values: list[tuple[Scope, torch.Tensor, torch.Tensor]] = []
        for (place, _), (scope, value) in mine.items():
            first = self._first[place]
            alone = sum(other == place for other, _ in mine) == 1
            if first is None or (alone and storage_of(first) == storage_of(value) and lies_as(first, value)):
                continue
            keeps = torch.Tensor.clone if storage_of(value) in memories else torch.Tensor.detach
            values.append((scope, first, self._in(scope, keeps, value)))
        for scope, first, value in values:
            self._in(scope, torch.Tensor.copy_, first, value)
        for key in mine:
            place = key[0]
            del self._written[key]
            place[0]._buffers[place[1]] = self._now[place] = self._first[place]

    def _keep_what_was_read(self, places: Iterable[Place]) -> None:
        """Let steps read copies of buffers that are about to be overwritten, which backward may need."""
        copies: dict[Any, Expr] = {}
        for place in places:
            first = self._first[place]
            # What was written to in place before stays one with what was read.
            if first is not None and first.is_floating_point() and version_of(first) == self._versions[place]:
                read = self._recorder.origins.value(first)
                copies[read] = Expr("clone", (read,))
        for step in self._recorder.steps if copies else ():
            given = step.args, step.kwargs
            reads = any(isinstance(part, Attribute) and part in copies for part in parts_of(given))
            if reads and not _saves_nothing(step):
                step.args, step.kwargs = with_steps(lambda part: copies.get(part, part), given, Attribute)

    def pass_over(self, modules: Iterable[nn.Module]) -> None:
        """Leave alone what a part that is kept whole has put in the places of its buffers."""
        for module in modules:
            self._names[module] = tuple(_held(module))
            for name, now in _held(module).items():
                place = module, name
                if now is not self._now.get(place):
                    self._now[place], self._first[place] = now, None

    def _in(self, scope: Scope, function: Callable[..., Any], *args: torch.Tensor) -> torch.Tensor:
        recorder = self._recorder
        outer, recorder.scope = recorder.scope, scope
        try:
            with recorder.silent():
                return recorder.function(function, args, {})
        finally:
            recorder.scope = outer


def _held(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module; none of a scripted one, which makes its tensors anew each time it is asked."""
    table: Any = module._buffers
    return table if isinstance(table, dict) else {}


_SAVE_NOTHING = frozenset(
    "add sub rsub neg detach clone copy_ zeros_like ones_like full_like empty_like mean sum cat stack".split()
)
"""Functions whose gradients need none of their arguments."""


def _saves_nothing(step: Step) -> bool:
    """Whether the gradient of a step needs nothing that it reads, as that of a product with a number."""
    computed = [arg for arg in step.args if isinstance(arg, Step | Attribute | Constant | Expr)]
    scales = step.called in ("mul", "div") and len(computed) == 1
    return scales or step.called in _SAVE_NOTHING or step.op == "placeholder"
