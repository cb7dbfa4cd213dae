"""The random number generators that a run may draw from: those of the process, and a model's own.

A model has one of its own if one of its modules holds it, be it in a container or an object, or if a global
name of the code of its classes is one. All of them are looked at to see whether a run draws, and restored
after it.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from pdp_fx.tracing.objects import Held
from pdp_fx.tracing.replacing import namespaces
from pdp_fx.tracing.structure import BASE_TYPES, OF_TORCH, attributes

_OF_NUMPY = (np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_KINDS = (random.Random, *_OF_NUMPY, torch.Generator)
_PLAIN = frozenset((int, float, bool, str, type(None)))
_CLOSED = (*BASE_TYPES, type, ModuleType, nn.Module, torch.Tensor, np.ndarray, fx.Graph)
"""What is not looked into: it holds no generators, or is a module, which is looked at for itself."""


@dataclass(frozen=True)
class _Own:
    """A model's own generators: those of torch, which a recording sees, and those of Python and NumPy."""

    of_torch: tuple[torch.Generator, ...] = ()
    others: tuple[Any, ...] = ()


_NONE = _Own()
_OWN: ContextVar[_Own] = ContextVar("own", default=_NONE)
"""Those of the model of the innermost `own_generators` block."""


@contextmanager
def own_generators(model: nn.Module) -> Generator[None, None, None]:
    """Take the model's own generators into account inside the block."""
    found = {id(each): each for each in _held_by(model)}.values()
    of_torch = tuple(each for each in found if isinstance(each, torch.Generator))
    outer = _OWN.set(_Own(of_torch, tuple(each for each in found if not isinstance(each, torch.Generator))))
    try:
        yield
    finally:
        _OWN.reset(outer)


def _held_by(model: nn.Module) -> Iterator[Any]:
    modules = list(model.modules())
    for names in namespaces(map(type, modules), of_torch=False):
        yield from chain.from_iterable(map(_generator, names.values()))
    held = (item for module in modules for item in vars(module).items())
    yield from _inside(value for name, value in held if name not in OF_TORCH)
    for node in model.graph.nodes if isinstance(model, fx.GraphModule) else ():
        if isinstance(node.target, Held):
            yield from _generator(node.target.thing)


def _generator(value: object) -> Iterator[Any]:
    """The value if it is a generator, or the generator whose bound method it is."""
    # Most values are neither, and there are many.
    if not _may_be(type(value)):
        return
    owner = value.__self__ if isinstance(value, MethodType | BuiltinMethodType) else None
    yield from (each for each in (value, owner) if isinstance(each, _KINDS))


@lru_cache(maxsize=4096)
def _may_be(kind: type) -> bool:
    return issubclass(kind, (*_KINDS, MethodType, BuiltinMethodType))


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    """The generators among values, in containers and in attributes of objects, also of those to call."""
    todo, seen = list(values), set[int]()
    while todo:
        value = todo.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, _CLOSED) or _is_ours(type(value)):
            continue
        seen.add(id(value))
        found = list(_generator(value))
        yield from found
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, tuple | list | set | deque):
            todo.extend(iter(value))
        elif not found:
            todo += attributes(value).values()


@cache
def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_own(generator: torch.Generator) -> bool:
    """Whether the model has it, so that the graph may draw from it."""
    return any(each is generator for each in _OWN.get().of_torch)


def torch_generators() -> tuple[torch.Tensor, ...]:
    """The states of torch's generators that every step is watched for: of the CPU, and of the model's own."""
    return torch.get_rng_state(), *(each.get_state() for each in _OWN.get().of_torch)


def _of_cuda() -> list[torch.Tensor]:
    """The states of the generators of the CUDA devices, if they are in use."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _of_other_devices() -> list[tuple[Callable[[Any], None], Any]]:
    """What puts the generators of other devices back that `seed` sets, each with its state."""
    found: list[tuple[Callable[[Any], None], Any]] = []
    if torch.xpu.is_initialized():
        found.append((torch.xpu.set_rng_state_all, torch.xpu.get_rng_state_all()))
    if torch.backends.mps.is_available():
        found.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return found


def seed(number: int) -> None:
    """Seed torch's generators of the CPU, and of the devices that are in use.

    `torch.manual_seed` would have others seeded as soon as they are used, which cannot be taken back.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    if torch.xpu.is_initialized():
        torch.xpu.manual_seed_all(number)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(number)


def other_generators() -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, comparable by `==`."""
    return tuple(
        map(_comparable, (random.getstate(), np.random.get_state(), *map(_state, _OWN.get().others)))
    )


def random_state() -> tuple[Any, ...]:
    """The states of all random number generators, comparable by `==`."""
    return tuple(map(_comparable, (*torch_generators(), *_of_cuda()))), other_generators()


@contextmanager
def generators_restored() -> Generator[None, None, None]:
    """Restore all generators at the end, also after an error."""
    own = _OWN.get()
    kept = [(each, _state(each)) for each in (*own.of_torch, *own.others)]
    cpu, cuda, others = torch.get_rng_state(), _of_cuda(), _of_other_devices()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for put_back, state in others:
            put_back(state)
        random.setstate(python)
        np.random.set_state(numpy)
        for each, state in kept:
            _set_state(each, state)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.state if isinstance(generator, np.random.BitGenerator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    else:
        generator.set_state(state)


def _comparable(state: Any) -> Any:
    """A state with bytes in the place of arrays and tensors."""
    if isinstance(state, torch.Tensor | np.ndarray):
        return np.asarray(state).tobytes()
    if isinstance(state, dict):
        return {key: _comparable(part) for key, part in state.items()}
    of_numpy = isinstance(state, tuple) and isinstance(state[0], str)
    return tuple(map(_comparable, state)) if of_numpy else state
