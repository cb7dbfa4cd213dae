"""The empty modules that stand in a graph module for those which were traced through.

They hold the tensors and children, and no code, for that is in the graph: a shell cannot be called, and its
hooks never run. It is printed as the module that it stands for, and its children are found in the same ways.
What a module adds to its state dict by `get_extra_state` is a matter of its own, so the shell asks it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from pdp_fx.errors import StateError

_STANDS_FOR = "stands_for"


class Shell(nn.Module):
    """A module without code.

    Args:
        module: what it stands for.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._kind = type(module).__name__

    def _get_name(self) -> str:
        return self._kind

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Fail.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"this {self._kind} cannot be called: the traced model is one graph, which computes what it did. "
            "Call the whole; or trace this module alone, and put the result into a model of your own"
        )


def _warns(name: str) -> Callable[..., Any]:
    """The method of modules that registers a hook, with a warning."""
    register = getattr(nn.Module, name)

    def registers(self: Shell, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"this hook of a {self._kind} never runs: the traced model is one graph and calls layers only. "
            "Register it before tracing, or with a layer",
            stacklevel=2,
        )
        return register(self, *args, **kwargs)

    return registers


for _name in (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_backward_hook",
):
    setattr(Shell, _name, _warns(_name))


class SequentialShell(Shell, nn.Sequential):
    """The shell of a sequence, whose parts are found by their positions."""

    def __getitem__(self, idx: Any) -> Any:
        parts = list(self._modules.values())
        return nn.ModuleList(filter(None, parts[idx])) if isinstance(idx, slice) else parts[idx]


class StateShell(Shell):
    """A shell that gives and takes the extra state of the module that it stands for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # No submodule: its tensors are those of the shells.
        vars(self)[_STANDS_FOR] = module

    def get_extra_state(self) -> Any:
        """What the module itself gives."""
        return vars(self)[_STANDS_FOR].get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Hand the state to the module itself."""
        vars(self)[_STANDS_FOR].set_extra_state(state)


def shell_of(module: nn.Module) -> nn.Module:
    """A shell for a module, without anything in it yet."""
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return StateShell(module)
    if type(module) in _LISTS:
        return type(module)()
    return SequentialShell(module) if isinstance(module, nn.Sequential) else Shell(module)


_LISTS = nn.ModuleList, nn.ModuleDict
"""These have no code of their own, so they stand for themselves."""


def is_shell(module: nn.Module) -> bool:
    """Whether a module is a shell."""
    return isinstance(module, Shell) or type(module) in (nn.Module, *_LISTS)


def keep_state(gm: nn.Module, root: nn.Module) -> None:
    """Let a graph module, which has a class of its own, have the extra state of what ``root`` stands for."""
    if _STANDS_FOR in vars(root):
        vars(gm)[_STANDS_FOR] = vars(root)[_STANDS_FOR]
        kind: Any = type(gm)
        kind.get_extra_state, kind.set_extra_state = StateShell.get_extra_state, StateShell.set_extra_state
