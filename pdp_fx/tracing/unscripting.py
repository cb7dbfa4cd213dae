"""Running the Python source of functions that TorchScript has compiled, because a recorder sees only that."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from pdp_fx.tracing.replacing import replaced


@contextmanager
def unscripted() -> Generator[set[str], None, None]:
    """Run Python instead of TorchScript inside the block, as torch.compile does; gives the functions' names.

    Both compute the same up to rounding.
    """
    script = torch.jit.ScriptFunction.__call__
    names: set[str] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(function, "_torchdynamo_inline", None)
        if python is None:
            return script(function, *args, **kwargs)
        names.add(python.__name__)
        return python(*args, **kwargs)

    with replaced(torch.jit.ScriptFunction, "__call__", call):
        yield names
