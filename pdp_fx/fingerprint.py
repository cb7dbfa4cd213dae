"""A digest of everything in a graph module that its channel structure depends on.

The channel structure depends on operations, module settings, shapes, and the numbers in index tables. It does
not depend on weights, modes, dtypes or devices. `convert` reuses the structure that `prepare` found if the
digest is still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import fx, nn

from pdp_fx.ops.kinds import named_modules
from pdp_fx.pruner import CHILD

_SETTINGS = (bool, int, float, str, tuple, type(None))


def fingerprint(gm: fx.GraphModule) -> str:
    """A digest that two graph modules share if they have the same channel structure."""
    digest = hashlib.sha256()
    for line in _lines(gm):
        digest.update(line.encode())
    return digest.hexdigest()


def tables(gm: fx.GraphModule) -> dict[str, str]:
    """A digest of every buffer of integers or booleans but counters: it may hold indices of channels."""
    found: dict[str, str] = {}
    for name, buffer in gm.named_buffers():
        others = buffer.is_floating_point() or buffer.is_complex() or buffer.layout is not torch.strided
        if buffer.ndim > 0 and not others and name.partition(".")[0] != CHILD:
            # A copy, for Tensor.numpy() would bar the buffer from ever being resized.
            numbers = buffer.to("cpu", copy=True).numpy()
            found[name] = hashlib.sha256(numbers.tobytes()).hexdigest()
    return found


def _lines(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        yield f"{node.format_node()}\n"
    for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]:
        yield f"{name} {tuple(tensor.shape)}\n"
    yield f"{tables(gm)}\n"
    for name, module in named_modules(gm):
        if name.partition(".")[0] != CHILD:
            yield f"{name} {_described(module)}\n"


def _described(module: nn.Module) -> str:
    kind = type(module)
    state = sorted((name, value) for name, value in vars(module).items() if isinstance(value, _SETTINGS))
    settings = [f"{name}={value!r}" for name, value in state if name != "training"]
    hooks = [len(vars(module)[table]) for table in ("_forward_hooks", "_forward_pre_hooks")]
    return f"{kind.__module__}.{kind.__qualname__} {settings} {hooks}"
