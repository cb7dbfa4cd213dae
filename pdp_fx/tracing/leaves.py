"""Which modules stay whole: `torch.nn` layers are leaves, containers and users' modules are traced through."""

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
COMPOSITES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.Transformer,
)
"""Modules of `torch.nn` that are made of others; a recording shows what they do."""


def is_whole(module: nn.Module) -> bool:
    """Whether a recording keeps a module whole: a leaf that is not made of others."""
    return is_leaf(module) and not isinstance(module, COMPOSITES)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one `call_module` node: it is defined in `torch.nn` and holds no free-form stack."""
    home = type(module).__module__
    return (home.startswith("torch.nn.") or home.startswith("torch.ao.nn.")) and not isinstance(
        module, _CONTAINERS
    )
