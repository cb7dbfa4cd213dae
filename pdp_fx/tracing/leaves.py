"""Which modules stay whole: layers of `torch.nn` are leaves; containers and users' modules are not."""

import torch
from torch import Tensor, nn
from torch.nn import modules
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    ParametrizationList,
)
COMPOSITES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
    nn.AdaptiveLogSoftmaxWithLoss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
)
"""Modules of `torch.nn` that are made of others, or of one function; a recording shows what they do."""


def is_whole(module: nn.Module) -> bool:
    """Whether a recording keeps a module whole: a leaf that a recording does not look into."""
    return is_leaf(module) and not isinstance(module, COMPOSITES)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one `call_module` node.

    `torch.nn` defines it and it is not a container, or TorchScript has compiled it.
    """
    if why_compiled(module):
        return True
    return is_layer(module) and not has_own_forward(module) and not _computes_weights(module)


def why_compiled(module: nn.Module) -> str:
    """Why a module that is no layer cannot be looked into: TorchScript has compiled it; empty of others."""
    return "is compiled by TorchScript" if isinstance(module, torch.jit.ScriptModule) else ""


def is_layer(module: nn.Module) -> bool:
    """Whether `torch.nn` defines a module, and it is not a container."""
    home = type(module).__module__
    return home.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _CONTAINERS)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module calls hooks around its ``forward``, its own or those of all modules."""
    of_all = modules.module._global_forward_pre_hooks or modules.module._global_forward_hooks
    return bool(of_all or module._forward_pre_hooks or module._forward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module calls hooks with its gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``forward`` was replaced in this one module, which then does not what its class does."""
    return "forward" in vars(module)


def _computes_weights(module: nn.Module) -> bool:
    """Whether a layer computes its weight anew for every call, by a parametrization or by a hook."""
    hooked = module._forward_pre_hooks and any(isinstance(value, Tensor) for value in vars(module).values())
    return bool(hooked) or is_parametrized(module)


def stores_tensors(module: nn.Module) -> bool:
    """Whether there are parameters or buffers in a module."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
