"""torch.nn modules that take their parameters as arguments.

A masked weight has to be a value in the graph, while the module that owns the parameter keeps its place and
its name. Each class here is the torch.nn module of the same name, with a ``forward`` that also takes
``weight`` and ``bias``; an argument that is None stands for the module's own parameter.
"""

from __future__ import annotations

from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from pdp_fx.ops.masked_norm import masked_group_norm, masked_layer_norm, masked_rms_norm
from pdp_fx.ops.select import transformed


class _ExplicitConv(_ConvNd):
    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return self._conv_forward(
            input, self.weight if weight is None else weight, self.bias if bias is None else bias
        )


class ExplicitConv1d(_ExplicitConv, nn.Conv1d):
    """`torch.nn.Conv1d` with explicit parameters."""


class ExplicitConv2d(_ExplicitConv, nn.Conv2d):
    """`torch.nn.Conv2d` with explicit parameters."""


class ExplicitConv3d(_ExplicitConv, nn.Conv3d):
    """`torch.nn.Conv3d` with explicit parameters."""


class _ExplicitConvTranspose(_ConvTransposeNd):
    def forward(
        self,
        input: Tensor,
        output_size: list[int] | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        dimensions = len(self.kernel_size)
        padding = self._output_padding(  # pyright: ignore[reportPrivateUsage]
            input,
            output_size,
            list(self.stride),
            list(cast(tuple[int, ...], self.padding)),
            list(self.kernel_size),
            dimensions,
            list(self.dilation),
        )
        function = getattr(functional, f"conv_transpose{dimensions}d")
        return function(
            input,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            self.stride,
            self.padding,
            padding,
            self.groups,
            self.dilation,
        )


class ExplicitConvTranspose1d(_ExplicitConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with explicit parameters."""


class ExplicitConvTranspose2d(_ExplicitConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with explicit parameters."""


class ExplicitConvTranspose3d(_ExplicitConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with explicit parameters."""


class ExplicitLinear(nn.Linear):
    """`torch.nn.Linear` with explicit parameters."""

    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return functional.linear(
            input, self.weight if weight is None else weight, self.bias if bias is None else bias
        )


class ExplicitEmbedding(nn.Embedding):
    """`torch.nn.Embedding` with explicit parameters."""

    def forward(self, input: Tensor, weight: Tensor | None = None) -> Tensor:
        return functional.embedding(
            input,
            self.weight if weight is None else weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class ExplicitEmbeddingBag(nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag` with explicit parameters."""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        return functional.embedding_bag(
            input,
            self.weight if weight is None else weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )


class _ExplicitBatchNorm(_BatchNorm):
    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        tracked = self.running_mean is not None and self.running_var is not None
        updates = self.training and self.track_running_stats
        return functional.batch_norm(
            input,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            self.training or not tracked,
            self._count_batch() if updates else (self.momentum or 0.0),
            self.eps,
        )

    def _count_batch(self) -> float:
        """Count one more training batch and return the weight of its statistics."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class ExplicitBatchNorm1d(_ExplicitBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` with explicit parameters."""


class ExplicitBatchNorm2d(_ExplicitBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` with explicit parameters."""


class ExplicitBatchNorm3d(_ExplicitBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` with explicit parameters."""


class _ExplicitInstanceNorm(_InstanceNorm):
    def forward(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        self._check_input_dim(input)
        unbatched = input.dim() == self._get_no_batch_dim()
        result = functional.instance_norm(
            input.unsqueeze(0) if unbatched else input,
            self.running_mean,
            self.running_var,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )
        return result.squeeze(0) if unbatched else result


class ExplicitInstanceNorm1d(_ExplicitInstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` with explicit parameters."""


class ExplicitInstanceNorm2d(_ExplicitInstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` with explicit parameters."""


class ExplicitInstanceNorm3d(_ExplicitInstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` with explicit parameters."""


class ExplicitLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` with explicit parameters and an optional mask of its channels."""

    def forward(
        self,
        input: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        if mask is None:
            return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return masked_layer_norm(input, self.normalized_shape, weight, bias, self.eps, mask=mask)


class ExplicitRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` with an explicit weight and an optional mask of its channels."""

    def forward(self, x: Tensor, weight: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        if mask is None:
            return functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return masked_rms_norm(x, self.normalized_shape, weight, self.eps, mask=mask)


class ExplicitGroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` with explicit parameters and an optional mask of its channels."""

    def forward(
        self,
        input: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        if mask is None:
            return functional.group_norm(input, self.num_groups, weight, bias, self.eps)
        return masked_group_norm(input, self.num_groups, weight, bias, self.eps, mask=mask)


def mask_axis(parameter: Tensor, mask: Tensor, axis: int) -> Tensor:
    """Multiply ``parameter`` by ``mask`` along ``axis``, in the parameter's own dtype.

    Args:
        parameter: any shape.
        mask: shape ``(parameter.shape[axis],)``, values in [0, 1].
        axis: the axis that the mask runs along.
    """
    shape = [1] * parameter.ndim
    shape[axis] = -1
    masked = parameter * mask.to(parameter.dtype).view(shape)
    if parameter.requires_grad and not (
        masked.requires_grad or transformed() or torch.compiler.is_compiling()
    ):
        # Also where gradients are off torch goes by it how it multiplies, and rounds.
        masked.requires_grad_()
    return masked


def reclass(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return ``module`` as an object of class ``kind`` that shares its parameters and buffers.

    The given module is untouched; both objects refer to the same tensors and child modules, in tables
    of their own: what is registered, hooked or switched on one does not show on the other. A method of
    the module that it holds itself, as in ``self.act = self._relu``, is one of the new object's.
    """
    made = object.__new__(kind)

    def own(name: str, value: object) -> object:
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(value.__func__, made)
        return value.copy() if name.startswith("_") and isinstance(value, (dict, set, list)) else value

    made.__dict__.update((name, own(name, value)) for name, value in module.__dict__.items())
    # What `module.compile()` has compiled is a call of the module.
    made.__dict__.pop("_compiled_call_impl", None)
    return made


def twin(module: nn.Module) -> nn.Module:
    """Return another object of the same class that shares parameters, buffers and child modules."""
    return reclass(module, type(module))
