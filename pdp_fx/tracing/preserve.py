"""Running a user's model and leaving no trace in it.

A forward pass may update BatchNorm statistics, draw random numbers, fill caches and set attributes. All of
that is put back, whether or not the run succeeds: training flags, attributes, the contents of buffers and of
plain lists and dicts that modules hold, and the random number generators of torch, Python and numpy.
"""

import random
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

# Hooks are in an OrderedDict, caches in anything.
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def preserved(*models: nn.Module) -> Generator[None, None, None]:
    """Put the models and the random number generators back at the end, also after an error."""
    modules = {id(module): module for model in models for module in model.modules()}
    saved = [_Saved(module) for module in modules.values()]
    generators = _generators()
    try:
        yield
    finally:
        for item in saved:
            item.restore()
        _set_generators(generators)


class _Saved:
    """One module as it was."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = {
            name: value.copy() for name, value in vars(module).items() if isinstance(value, _CONTAINERS)
        }
        self.buffers = [
            (buffer, buffer.detach().clone()) for buffer in module._buffers.values() if buffer is not None
        ]
        self.gradients = [
            (parameter, parameter.requires_grad)
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def restore(self) -> None:
        state = vars(self.module)
        state.clear()
        state.update(self.attributes)
        for name, content in self.contents.items():
            _refill(state[name], content)
        with torch.no_grad():
            for buffer, value in self.buffers:
                if not _same(buffer, value):
                    buffer.copy_(value)
        for parameter, wanted in self.gradients:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)


def _refill(container: Any, content: Any) -> None:
    if container == content if isinstance(container, set) else _identical(container, content):
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _identical(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(container, list | deque):
        return all(mine is theirs for mine, theirs in zip(container, content, strict=True))
    pairs = zip(container.items(), content.items(), strict=True)
    return all(mine[0] is theirs[0] and mine[1] is theirs[1] for mine, theirs in pairs)


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return buffer.shape == value.shape and torch.equal(buffer, value)


def _generators() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
    random.setstate(states[2])
    np.random.set_state(states[3])


def generator_states() -> tuple[Any, ...]:
    """The states of Python's and numpy's generators, comparable by `==`."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)
