"""Where each tensor of a run came from.

Tensors are known by identity: a parameter or buffer by its name, a computed tensor by the step that made it,
part of a result by how to reach it. Containers and objects that came whole out of a step are known too, so
that they can be passed on whole.
"""

import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pdp_fx.tracing.steps import (
    Attribute,
    Constant,
    Expr,
    Step,
    UnrecordableError,
    Value,
    is_input,
    is_ragged,
    root,
)
from pdp_fx.tracing.structure import BASE_TYPES, OF_TORCH, are_one, children, has_tensors, objects, tensors
from pdp_fx.tracing.watch import Watch, storage_of


class Origins:
    """The values of all tensors seen so far.

    Args:
        model: the model that runs.
        watch: knows which memory was allocated in this run.
        alias: makes another tensor object of a tensor, unrecorded.
        another: records that another tensor object is made of a tensor, if told so without its gradient.

    Attributes:
        unseen: as in `Recording`.
    """

    def __init__(
        self,
        model: nn.Module,
        watch: Watch,
        alias: Callable[[torch.Tensor], torch.Tensor],
        another: Callable[[torch.Tensor, bool], Value],
    ) -> None:
        self._model = model
        named = (*model.named_parameters(), *model.named_buffers())
        self._attributes = {id(tensor): Attribute(path) for path, tensor in named}
        self._own = {
            (id(module), name): id(parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
        }
        # Of parameters, buffers and inputs, which others see behind the run.
        self._lasting = {storage_of(tensor) for _, tensor in named}
        self._watch = watch
        self._alias, self._another = alias, another
        self._values = WeakTensorKeyDictionary()
        self._of_functions = WeakTensorKeyDictionary()
        self._replaced = WeakTensorKeyDictionary()
        self._aliases: dict[int, list[TensorWeakRef]] = {}
        self._constants: dict[int, Constant] = {}
        self.unseen: list[torch.Tensor] = []
        self._objects: dict[int, tuple[Any, Value, list[Any]]] = {}
        self._copied: dict[int, tuple[Any, Any]] = {}

    def value(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor is; one that existed before the run is a constant.

        Raises:
            UnrecordableError: it was made in this run, but by no recorded step, or an autograd function that
                was not seen has made its gradient another; or it is what `replace_memory` is about.
        """
        if tensor in self._replaced:
            raise UnrecordableError("uses what a tensor held before its `data` was set")
        known = self.known(tensor)
        if known is not None:
            if isinstance(known, Step) and _is_of_function(tensor) and tensor not in self._of_functions:
                raise UnrecordableError("calls an autograd function's apply that was looked up before")
            return known
        if self._watch.is_ours(tensor):
            for source, detached in self._watch.sources(tensor):
                if self.known(source) is not None:
                    self._values[tensor] = self._another(source, detached)
                    return self._values[tensor]
            if self._watch.is_empty(tensor):
                return self.constant(tensor)
            raise UnrecordableError("uses a tensor made by code that torch functions do not show")
        self.unseen.append(tensor)
        return self.constant(tensor)

    def is_kept(self, thing: Any) -> bool:
        """Whether an object is an attribute of one of the model's modules, or inside one."""
        return id(thing) in self._kept

    @cached_property
    def _kept(self) -> dict[int, Any]:
        attributes = (
            value
            for module in self._model.modules()
            for name, value in vars(module).items()
            if name not in OF_TORCH
        )
        return {id(thing): thing for thing in objects(tuple(attributes))}

    def known(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor is so far; None if no step has made it."""
        return self._values.get(tensor) or self._attributes.get(id(tensor)) or self._constants.get(id(tensor))

    def lends(self, module: nn.Module) -> bool:
        """Whether a module's parameters are replaced for now, as `torch.func.functional_call` does."""
        return any(
            parameter is not None and self._own.get((id(part), name)) != id(parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
        )

    def constant(self, tensor: torch.Tensor) -> Constant:
        """Make a tensor a constant of the graph.

        Raises:
            UnrecordableError: it may have been drawn at random, by numpy or by Python.
        """
        if self._watch.has_drawn_outside():
            raise UnrecordableError("uses random numbers from outside torch")
        made = self._constants[id(tensor)] = Constant(tensor)
        return made

    def is_ragged(self, args: tuple[Any, ...]) -> bool:
        """Whether there is a tensor among the arguments whose size depends on numbers."""
        return any(is_ragged(self._values.get(tensor)) for tensor in tensors(args))

    def note_sized(self, tensor: torch.Tensor) -> None:
        """Note that the model reads a size of a tensor, which depends on numbers."""
        maker = root(self._values.get(tensor))
        if maker is not None:
            maker.sized = True

    def object(self, thing: Any) -> Value | None:
        """The value of a container or object that a step returned whole and that is unchanged; else None."""
        known = self._objects.get(id(thing))
        if known is None or known[0] is not thing or not _has_parts(thing, known[2]):
            return None
        return known[1]

    def note_copy(self, made: Any, thing: Any) -> None:
        """Note that a container or object which a step has returned is another in this run."""
        self._copied[id(made)] = made, thing

    def original(self, thing: Any) -> Any:
        """What a step has returned in the place of a container or object, if this is unchanged."""
        made, original = self._copied.get(id(thing), (None, None))
        return original if made is thing and self.object(thing) is not None else thing

    def remember(self, thing: Any, value: Value) -> None:
        """Note the value that a container or object is, by its identity."""
        parts = [TensorWeakRef(part) if isinstance(part, torch.Tensor) else part for part in _parts(thing)]
        self._objects[id(thing)] = (thing, value, parts)

    def adopt(self, result: Any, value: Value, changed: tuple[torch.Tensor, ...] = ()) -> Any:
        """Remember where the tensors in a result come from; returns the result to hand to the model.

        A function that returns its argument unchanged (dropout in eval mode, `contiguous`) must not make the
        model's later uses of the argument look like uses of the result: such a result is replaced by an
        alias. Of an argument that was changed in place and returned, later uses are uses of the result.

        Args:
            result: what a step returned.
            value: the step, or how to reach the result from it.
            changed: the tensors that the step changed in place.
        """
        if isinstance(result, torch.Tensor):
            return self._adopt_tensor(result, value, changed)
        if isinstance(result, BASE_TYPES) or not has_tensors(result):
            return result
        adopted: dict[Any, Any] = {}
        for kind, key, part in list(children(result)):
            reach = getattr if kind == "attribute" else operator.getitem
            adopted[key] = self.adopt(part, Expr(reach, (value, key)), changed)
        if isinstance(result, list | dict):
            for key, part in adopted.items():
                result[key] = part
        elif type(result) is tuple:
            result = tuple(adopted.values())
        maker = root(value)
        if maker is not None and (maker.op == "placeholder" or maker.reason):
            self.remember(result, value)
        return result

    def _note_function(self, tensor: torch.Tensor) -> None:
        """Note of what a step returned that an autograd function made it: later, none may have."""
        if _is_of_function(tensor):
            self._of_functions[tensor] = True

    def _adopt_tensor(
        self, tensor: torch.Tensor, value: Value, changed: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        if any(tensor is other for other in changed):
            if id(tensor) not in self._attributes:
                self._values[tensor] = value
                self._note_function(tensor)
            return tensor
        if self.known(tensor) is not None:
            tensor = self._alias(tensor)
        self._values[tensor] = value
        self._note_function(tensor)
        self._aliases.setdefault(storage_of(tensor), []).append(TensorWeakRef(tensor))
        if is_input(value):
            self._lasting.add(storage_of(tensor))
        return tensor

    def change(self, tensor: torch.Tensor, step: Step, returned: bool) -> bool:
        """Note that a step changes a tensor in place.

        What is written into a tensor is also in its views, and in what it is a view of.

        Returns:
            Whether the change is seen by more than the users of the step's result.
        """
        observed = self._is_seen_elsewhere(tensor)
        for owner in self._sharing(tensor):
            maker = root(self._values.get(owner))
            if maker is not None:
                maker.data |= step.data
                maker.ragged |= step.ragged
                maker.varies |= step.varies
        return observed or not returned

    def replace_memory(self, tensor: torch.Tensor) -> None:
        """Note that a tensor gets other memory, which its views do not: a graph cannot tell them from it."""
        for owner in self._sharing(tensor):
            if owner is not tensor:
                self._replaced[owner] = True

    def _is_seen_elsewhere(self, tensor: torch.Tensor) -> bool:
        if storage_of(tensor) in self._lasting or id(tensor) in self._constants:
            return True
        return any(owner is not tensor for owner in self._sharing(tensor))

    def _sharing(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        owners = (ref() for ref in self._aliases.get(storage_of(tensor), []))
        return [owner for owner in owners if owner is not None]


def _parts(thing: Any) -> list[Any]:
    """All that is in a container or object, at any depth."""
    found, todo, seen = list[Any](), [thing], set[int]()
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, (torch.Tensor, *BASE_TYPES)):
            continue
        seen.add(id(part))
        inner = [each for _, _, each in children(part)]
        found += inner
        todo += inner
    return found


def _has_parts(thing: Any, noted: list[Any]) -> bool:
    """Whether these are the parts of a container or object, of which tensors are noted by weak references."""
    parts = _parts(thing)
    were = [ref() if isinstance(ref, TensorWeakRef) else ref for ref in noted]
    return len(parts) == len(were) and all(map(are_one, parts, were))


def _is_of_function(tensor: torch.Tensor) -> bool:
    try:
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)
    except RuntimeError:
        # A view that was made without gradients, and then written through, has no history to ask for.
        return False
