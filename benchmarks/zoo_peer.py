"""Torch-Pruning on a model of the zoo: ratio 0.5 on every group, and no hint about the model.

It is exact when the smaller model gives what the large one gives with the removed channels set to
0 where they are made, which is the comparison that we make for our own.
"""

from __future__ import annotations

import copy
import importlib
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.zoo_outputs import TOLERANCE, Arguments, call, difference, in_dtype, verdict
from pdp_fx.ops.kinds import named_modules

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding)
Removed = dict[str, set[int]]


def measure_peer(model: nn.Module, example: Arguments, other: Arguments) -> dict[str, Any]:
    """Prune ``model`` in place; return status, seconds, largest difference, and the smaller model."""
    importlib.import_module("torch_pruning")  # not in the seconds
    masked = copy.deepcopy(model).eval()
    ignored = output_layers(model, example)
    started = time.process_time()
    try:
        removed = _prune(model.eval(), example, ignored)
        seconds = time.process_time() - started
        _mask(masked, removed)
        worst = difference(masked, model, (example, other))
        if worst > TOLERANCE[torch.float32]:
            worst = _difference_in_double(masked, model, (example, other))
    except Exception as err:  # noqa: BLE001 - the benchmark is about what fails, and how
        return {"peer_status": f"failed: {type(err).__name__}: {str(err)[:200]}"}
    if not any(removed.values()):
        return {"peer_status": "failed: nothing pruned", "peer_s": seconds}
    found = {"peer_status": verdict(worst, model), "peer_difference": worst, "peer_s": seconds}
    return found | {"model": model}


def _difference_in_double(masked: nn.Module, model: nn.Module, batches: tuple[Arguments, ...]) -> float:
    doubled = tuple(in_dtype(batch, torch.float64) for batch in batches)
    return difference(copy.deepcopy(masked).double(), copy.deepcopy(model).double(), doubled)


def output_layers(model: nn.Module, inputs: Arguments) -> list[nn.Module]:
    """The layers that make the channels of the outputs, found by the gradient: they keep their size."""
    owners = {id(p): module for _, module in named_modules(model) for p in module.parameters(recurse=False)}
    todo = [out.grad_fn for out in call(model.eval(), inputs)]
    seen: set[Any] = set()
    found: list[nn.Module] = []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        weights = [weight for weight in _weights(node) if weight.ndim > 1 and id(weight) in owners]
        found += [owners[id(weight)] for weight in weights]
        if not weights:
            todo += [following for following, _ in node.next_functions]
    return found


def _weights(node: Any) -> list[Tensor]:
    """The parameters that a step of the gradient leads to at once, or behind a transposition."""
    ends = [following for following, _ in node.next_functions if following is not None]
    ends += [last for end in ends if end.name() == "TBackward0" for last, _ in end.next_functions]
    return [end.variable for end in ends if hasattr(end, "variable")]


def _prune(model: nn.Module, example: Arguments, ignored: list[nn.Module]) -> Removed:
    """Prune every group; return the removed output channels of each layer by their first indices."""
    peer = importlib.import_module("torch_pruning")
    importance = peer.importance.MagnitudeImportance(p=2)
    pruner = peer.pruner.MagnitudePruner(
        model, example, importance=importance, pruning_ratio=0.5, ignored_layers=ignored
    )
    names = {module: name for name, module in named_modules(model)}
    alive: dict[str, list[int]] = {}
    removed: Removed = {}
    for group in pruner.step(interactive=True):
        for dep, places in group.items:
            module = dep.target.module
            if module in names and pruner.DG.is_out_channel_pruning_fn(dep.handler):
                rows = alive.setdefault(names[module], list(range(_width(module))))
                gone = {rows[int(place)] for place in places if int(place) < len(rows)}
                removed.setdefault(names[module], set()).update(gone)
                alive[names[module]] = [row for row in rows if row not in gone]
        group.prune()
    return removed


def _axis(module: nn.Module) -> int:
    return 1 if isinstance(module, TRANSPOSED) else 0


def _width(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return int(weight.shape[_axis(module)]) if isinstance(weight, Tensor) else 0


def _mask(model: nn.Module, removed: Removed) -> None:
    """Set what was removed to 0 where it is made."""
    modules = dict(named_modules(model))
    for name, rows in removed.items():
        module, index = modules[name], sorted(rows)
        for attribute in ("weight", "bias"):
            tensor = cast(Tensor | None, getattr(module, attribute, None))
            if tensor is not None and index:
                axis = _axis(module) if tensor.ndim > 1 else 0
                with torch.no_grad():
                    tensor.index_fill_(axis, torch.tensor(index), 0)
