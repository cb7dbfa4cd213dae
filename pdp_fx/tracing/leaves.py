"""Which modules stay whole: `torch.nn` layers are leaves, containers and users' modules are traced through."""

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one `call_module` node: it is defined in `torch.nn` and holds no free-form stack."""
    home = type(module).__module__
    return (home.startswith("torch.nn.") or home.startswith("torch.ao.nn.")) and not isinstance(
        module, _CONTAINERS
    )
