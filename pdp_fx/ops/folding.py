"""Layers and BatchNorms in one form for `fold_batch_norm`, whether they are modules or functions.

A function that is given stored parameters unchanged computes what the module of the same name computes, so it
is represented by such a module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, fx, nn
from torch.nn import functional

from pdp_fx.ops.kinds import Fold, attribute, fold_rows, fold_transposed, kind_of


@dataclass(frozen=True)
class Unfolded:
    """A layer or a BatchNorm.

    Attributes:
        module: the module; for a function, a module made for it, whose tensors are copies.
        parts: the modules, parameters and buffers in use, none of which may be used elsewhere.
        fold: for a layer, computes the weight and bias with a BatchNorm folded in.
        ranks: for a BatchNorm, the numbers of axes that its input may have.
        trainable: for a layer, whether its weight is trained.
        reads: for a function, the nodes that read its tensors, by the names that a module gives them.
    """

    module: nn.Module
    parts: tuple[nn.Module | Tensor, ...]
    fold: Fold | None = None
    ranks: tuple[int, ...] = ()
    trainable: bool = True
    reads: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])


_FOLDS: dict[Any, tuple[Fold, tuple[str, ...]]] = {
    **dict.fromkeys(
        (functional.conv1d, functional.conv2d, functional.conv3d),
        (fold_rows, ("input", "weight", "bias", "stride", "padding", "dilation", "groups")),
    ),
    functional.linear: (fold_rows, ("input", "weight", "bias")),
    **dict.fromkeys(
        (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
        (fold_transposed, ("input", "weight", "bias", "stride", "padding", "output_padding", "groups")),
    ),
}
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_ANY_RANK = (2, 3, 4, 5)
_TENSORS = ("weight", "bias", "running_mean", "running_var")


def layer_at(gm: fx.GraphModule, node: fx.Node) -> Unfolded | None:
    """The layer that ``node`` is, or None if no BatchNorm folds into it."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        fold = getattr(kind_of(module), "fold", None)
        trainable = fold is not None and cast(nn.Conv2d, module).weight.requires_grad
        return None if fold is None else Unfolded(module, _parts(module), fold, (), trainable)
    if node.op != "call_function" or node.target not in _FOLDS:
        return None
    fold, names = _FOLDS[node.target]
    given = _arguments(node, names)
    groups = given.get("groups", 1)
    reads = _reads(gm, given)
    if reads is None or "weight" not in reads or not isinstance(groups, int):
        return None
    stored = _stored(gm, reads)
    if not all(isinstance(tensor, nn.Parameter) for tensor in stored):
        return None
    module: Any = _stand_in(gm, reads)
    module.groups, module.in_channels = groups, module.weight.shape[0]
    return Unfolded(module, stored, fold, (), stored[0].requires_grad, reads)


def norm_at(gm: fx.GraphModule, node: fx.Node) -> Unfolded | None:
    """The BatchNorm that ``node`` is in eval mode, if it uses running statistics, or None."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        ranks = _ANY_RANK if type(module) is nn.SyncBatchNorm else getattr(kind_of(module), "norm_ranks", ())
        tracked = bool(ranks) and cast(nn.BatchNorm2d, module).running_mean is not None
        return Unfolded(module, _parts(module), None, ranks) if tracked else None
    if node.op != "call_function" or node.target is not functional.batch_norm:
        return None
    given = _arguments(node, _BATCH_NORM)
    reads, eps = _reads(gm, given), given.get("eps", 1e-5)
    if reads is None or "running_mean" not in reads or "running_var" not in reads:
        return None
    if given.get("training", False) is not False or not isinstance(eps, float):
        return None
    module: Any = _stand_in(gm, reads)
    module.eps = eps
    return Unfolded(module, _stored(gm, reads), None, _ANY_RANK, False, reads)


def _parts(module: nn.Module) -> tuple[nn.Module | Tensor, ...]:
    return (module, *module.parameters(), *module.buffers())


def _arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _reads(gm: fx.GraphModule, given: dict[str, Any]) -> dict[str, fx.Node] | None:
    """The nodes that read stored tensors; None if an argument that should be one is computed."""
    found = {name: given[name] for name in _TENSORS if given.get(name) is not None}
    if all(isinstance(node, fx.Node) and _is_stored(gm, node) for node in found.values()):
        return found
    return None


def _is_stored(gm: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(attribute(gm, node.target), Tensor)


def _stored(gm: fx.GraphModule, reads: dict[str, fx.Node]) -> tuple[Tensor, ...]:
    return tuple(attribute(gm, node.target) for node in reads.values())


def _stand_in(gm: fx.GraphModule, reads: dict[str, fx.Node]) -> nn.Module:
    """A module with copies of these tensors under their usual names."""
    made = nn.Module()
    for name in _TENSORS:
        made.register_buffer(
            name, attribute(gm, reads[name].target).detach().clone() if name in reads else None
        )
    return made
