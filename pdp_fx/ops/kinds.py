"""What the compiler knows of each torch.nn module type that owns weights.

A pass asks this table instead of testing types: can a module's parameters be masked, is its weight
worth pruning, what must change when its tensors have been sliced, how does BatchNorm fold into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pdp_fx.ops import explicit
from pdp_fx.ops import explicit_recurrent as recurrent
from pdp_fx.tracing.leaves import has_own_forward

Fold = Callable[[nn.Module, nn.Module], tuple[Tensor, Tensor]]
Refresh = Callable[[nn.Module, np.ndarray | None], None]


def _refresh_conv(module: nn.Module, stays: np.ndarray | None) -> None:
    conv = cast(nn.Conv2d, module)
    rows, columns = conv.weight.shape[:2]
    if conv.groups > 1 and stays is not None:
        conv.groups = int(stays.sum()) // columns
    conv.out_channels, conv.in_channels = rows, columns * conv.groups


def _refresh_transposed(module: nn.Module, stays: np.ndarray | None) -> None:
    conv = cast(nn.ConvTranspose2d, module)
    if conv.groups > 1 and conv.groups == conv.in_channels:
        conv.groups = conv.weight.shape[0]
    conv.in_channels, columns = conv.weight.shape[:2]
    conv.out_channels = columns * conv.groups


def _refresh_linear(module: nn.Module, stays: np.ndarray | None) -> None:
    linear = cast(nn.Linear, module)
    linear.out_features, linear.in_features = linear.weight.shape


def _refresh_embedding(module: nn.Module, stays: np.ndarray | None) -> None:
    table = cast(nn.Embedding, module)
    table.num_embeddings, table.embedding_dim = table.weight.shape


def _refresh_norm(module: nn.Module, stays: np.ndarray | None) -> None:
    norm = cast(nn.BatchNorm2d, module)
    stored = [tensor for tensor in (norm.weight, norm.running_mean) if tensor is not None]
    norm.num_features = len(stored[0]) if stored else norm.num_features


def _refresh_layer_norm(module: nn.Module, stays: np.ndarray | None) -> None:
    norm = cast(nn.LayerNorm, module)
    if stays is not None:
        norm.normalized_shape = (int(stays.sum()),)


def _refresh_group_norm(module: nn.Module, stays: np.ndarray | None) -> None:
    norm = cast(nn.GroupNorm, module)
    if stays is not None:
        norm.num_groups, norm.num_channels = groups_left(stays, norm.num_groups), int(stays.sum())


def groups_left(stays: np.ndarray, groups: int) -> int:
    """How many of the groups of a group norm have channels left; ``stays`` are booleans, one a channel."""
    return int(stays.reshape(groups, -1).any(1).sum())


def _refresh_recurrent(module: nn.Module, stays: np.ndarray | None) -> None:
    """Update the numbers of features that a recurrent module reads and makes."""
    recurrent, suffix = cast(Any, module), "_l0" if isinstance(module, nn.RNNBase) else ""
    recurrent.input_size = module.get_parameter(f"weight_ih{suffix}").shape[1]
    recurrent.hidden_size = module.get_parameter(f"weight_hh{suffix}").shape[1]
    if getattr(recurrent, "proj_size", 0):
        recurrent.proj_size, recurrent.hidden_size = recurrent.weight_hr_l0.shape


def fold_rows(module: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The weight and bias of a layer with a BatchNorm folded in; rows of the weight are output channels."""
    layer, (scale, shift) = cast(nn.Conv2d, module), _affine(norm)
    weight = layer.weight * scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
    return weight, shift if layer.bias is None else shift + layer.bias * scale


def fold_transposed(module: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """`fold_rows` for a transposed convolution, whose weight is (inputs, outputs / groups, ...)."""
    layer, (scale, shift) = cast(nn.ConvTranspose2d, module), _affine(norm)
    rows = scale.reshape(layer.groups, 1, -1).expand(-1, layer.in_channels // layer.groups, -1).flatten(0, 1)
    weight = layer.weight * rows.reshape(*rows.shape, *[1] * (layer.weight.ndim - 2))
    return weight, shift if layer.bias is None else shift + layer.bias * scale


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The factor and the summand of BatchNorm in eval mode, one for each channel."""
    stored: Any = norm
    scale = torch.rsqrt(stored.running_var + stored.eps)
    scale = scale if stored.weight is None else stored.weight * scale
    shift = -stored.running_mean * scale
    return scale, shift if stored.bias is None else stored.bias + shift


@dataclass(frozen=True)
class ModuleKind:
    """One torch.nn module type.

    Attributes:
        plain: the type itself; subclasses do not count, since they may compute anything.
        explicit: the same module with parameters as arguments (`pdp_fx.ops.explicit`).
        parameters: the parameters that can be passed as arguments; empty for a recurrent module, whose
            parameters depend on its number of layers.
        prunable: whether its weights are pruned unstructured or N:M.
        refresh: updates the module's sizes from its tensors and from which of its input channels stay.
        fold: computes the weight and bias that include a BatchNorm after the module.
        takes_mask: whether the explicit module takes a mask of the channels that it normalises.
        norm_ranks: for a BatchNorm that can be folded, the numbers of axes that its input may have.
    """

    plain: type[nn.Module]
    explicit: type[nn.Module]
    parameters: tuple[str, ...]
    prunable: bool
    refresh: Refresh
    fold: Fold | None = None
    norm_ranks: tuple[int, ...] = ()
    takes_mask: bool = False

    def given_to(self, module: nn.Module) -> tuple[str, ...]:
        """The parameters that can be passed to a module of this kind as arguments."""
        return self.parameters or tuple(name for name, _ in module.named_parameters(recurse=False))

    def weights_of(self, module: nn.Module) -> tuple[str, ...]:
        """The parameters that are pruned unstructured or N:M: matrices and kernels."""
        return tuple(name for name in self.given_to(module) if self.prunable and name.startswith("weight"))


_BOTH = ("weight", "bias")
_KINDS = (
    ModuleKind(nn.Conv1d, explicit.ExplicitConv1d, _BOTH, True, _refresh_conv, fold_rows),
    ModuleKind(nn.Conv2d, explicit.ExplicitConv2d, _BOTH, True, _refresh_conv, fold_rows),
    ModuleKind(nn.Conv3d, explicit.ExplicitConv3d, _BOTH, True, _refresh_conv, fold_rows),
    ModuleKind(
        nn.ConvTranspose1d,
        explicit.ExplicitConvTranspose1d,
        _BOTH,
        True,
        _refresh_transposed,
        fold_transposed,
    ),
    ModuleKind(
        nn.ConvTranspose2d,
        explicit.ExplicitConvTranspose2d,
        _BOTH,
        True,
        _refresh_transposed,
        fold_transposed,
    ),
    ModuleKind(
        nn.ConvTranspose3d,
        explicit.ExplicitConvTranspose3d,
        _BOTH,
        True,
        _refresh_transposed,
        fold_transposed,
    ),
    ModuleKind(nn.Linear, explicit.ExplicitLinear, _BOTH, True, _refresh_linear, fold_rows),
    ModuleKind(nn.Embedding, explicit.ExplicitEmbedding, ("weight",), False, _refresh_embedding),
    ModuleKind(nn.EmbeddingBag, explicit.ExplicitEmbeddingBag, ("weight",), False, _refresh_embedding),
    ModuleKind(nn.InstanceNorm1d, explicit.ExplicitInstanceNorm1d, _BOTH, False, _refresh_norm),
    ModuleKind(nn.InstanceNorm2d, explicit.ExplicitInstanceNorm2d, _BOTH, False, _refresh_norm),
    ModuleKind(nn.InstanceNorm3d, explicit.ExplicitInstanceNorm3d, _BOTH, False, _refresh_norm),
    ModuleKind(nn.LayerNorm, explicit.ExplicitLayerNorm, _BOTH, False, _refresh_layer_norm, takes_mask=True),
    ModuleKind(
        nn.RMSNorm, explicit.ExplicitRMSNorm, ("weight",), False, _refresh_layer_norm, takes_mask=True
    ),
    ModuleKind(nn.GroupNorm, explicit.ExplicitGroupNorm, _BOTH, False, _refresh_group_norm, takes_mask=True),
    ModuleKind(nn.BatchNorm1d, explicit.ExplicitBatchNorm1d, _BOTH, False, _refresh_norm, norm_ranks=(2, 3)),
    ModuleKind(nn.BatchNorm2d, explicit.ExplicitBatchNorm2d, _BOTH, False, _refresh_norm, norm_ranks=(4,)),
    ModuleKind(nn.BatchNorm3d, explicit.ExplicitBatchNorm3d, _BOTH, False, _refresh_norm, norm_ranks=(5,)),
    ModuleKind(nn.LSTM, recurrent.ExplicitLSTM, (), True, _refresh_recurrent),
    ModuleKind(nn.GRU, recurrent.ExplicitGRU, (), True, _refresh_recurrent),
    ModuleKind(nn.RNN, recurrent.ExplicitRNN, (), True, _refresh_recurrent),
    ModuleKind(nn.LSTMCell, recurrent.ExplicitLSTMCell, (), True, _refresh_recurrent),
    ModuleKind(nn.GRUCell, recurrent.ExplicitGRUCell, (), True, _refresh_recurrent),
    ModuleKind(nn.RNNCell, recurrent.ExplicitRNNCell, (), True, _refresh_recurrent),
)
PRUNABLE = tuple(kind.plain for kind in _KINDS if kind.prunable)
"""The types whose weights are pruned unstructured or N:M."""

_BY_TYPE = {kind.plain: kind for kind in _KINDS} | {kind.explicit: kind for kind in _KINDS}


def kind_of(module: nn.Module) -> ModuleKind | None:
    """The kind of ``module``, or None for one that this table does not know."""
    return None if has_own_forward(module) else _BY_TYPE.get(type(module))


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module in ``root``, outer ones first, under every name that it has."""
    return cast(list[tuple[str, nn.Module]], list(root.named_modules(remove_duplicate=False)))


def owned_names(gm: fx.GraphModule) -> dict[int, str]:
    """The canonical name of every parameter and buffer, by the tensor's identity."""
    names: dict[int, str] = {}
    for name, tensor in [*gm.named_parameters(), *gm.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


def attribute(gm: fx.GraphModule, target: object) -> Any:
    """What a `get_attr` node with this target reads; None if there is nothing of that name."""
    owner, _, name = str(target).rpartition(".")
    return getattr(gm.get_submodule(owner), name, None)


def input_axis(module: nn.Module) -> int:
    """The axis of a module's weight that runs along its input channels."""
    return 0 if isinstance(module, _ConvTransposeNd) else 1
