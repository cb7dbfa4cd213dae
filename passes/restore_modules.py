"""Turn modules with explicit parameters back into the plain torch.nn modules that they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from pdp_fx.compiler import Context, Pass
from pdp_fx.errors import PassError
from pdp_fx.ops.explicit import reclass
from pdp_fx.ops.kinds import kind_of
from pdp_fx.passes.expose_parameters import swap_modules


@dataclass(frozen=True)
class RestoreModules(Pass):
    """Lets every module read its own parameters again, so that the graph prints as the user's modules."""

    name: ClassVar[str] = "restore-modules"

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        swaps: dict[nn.Module, nn.Module] = {}
        for node in gm.graph.find_nodes(op="call_module"):
            target = str(node.target)
            module = gm.get_submodule(target)
            kind = kind_of(module)
            if kind is None:
                continue
            given = [name for name in kind.given_to(module) if name in node.kwargs]
            for name in given:
                _check_own(gm, node, name)
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in given}
            if type(module) is kind.explicit and module not in swaps:
                swaps[module] = reclass(module, kind.plain)
        swap_modules(gm, swaps)
        return bool(swaps)


def _check_own(gm: fx.GraphModule, node: fx.Node, name: str) -> None:
    """Check that the argument ``name`` of a module call is the module's own parameter."""
    read = node.kwargs[name]
    own = getattr(gm.get_submodule(str(node.target)), name)
    if (
        not isinstance(read, fx.Node)
        or read.op != "get_attr"
        or gm.get_parameter(str(read.target)) is not own
    ):
        raise PassError(f"%{node.name} is given a {name} that is not its own, so it cannot be a plain module")
