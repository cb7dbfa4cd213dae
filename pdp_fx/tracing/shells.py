"""The empty modules that stand in a graph module for those which were traced through.

They hold the tensors and children, and no code; but what a module adds to its state dict by `get_extra_state`
is a matter of its own, so the shell of such a module asks it.
"""

from typing import Any

from torch import nn

_STANDS_FOR = "stands_for"


class StateShell(nn.Module):
    """An empty shell that gives and takes the extra state of the module that it stands for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
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
    has_state = type(module).get_extra_state is not nn.Module.get_extra_state
    return StateShell(module) if has_state else nn.Module()


def is_shell(module: nn.Module) -> bool:
    """Whether a module is a shell."""
    return type(module) in (nn.Module, StateShell)


def keep_state(gm: nn.Module, root: nn.Module) -> None:
    """Let a graph module, which has a class of its own, have the extra state of what ``root`` stands for."""
    if _STANDS_FOR in vars(root):
        vars(gm)[_STANDS_FOR] = vars(root)[_STANDS_FOR]
        kind: Any = type(gm)
        kind.get_extra_state, kind.set_extra_state = StateShell.get_extra_state, StateShell.set_extra_state
