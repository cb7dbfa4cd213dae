"""Running a graph node by node."""

from typing import Any, cast

from torch import fx

from pdp_fx.tracing.examples import ExampleCall
from pdp_fx.tracing.inputs import place_arguments
from pdp_fx.tracing.structure import changeable


class Interpreter(fx.Interpreter):
    """Runs a graph as its generated code does: with plain lists and dicts in the place of those of fx."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that a node is called with."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(changeable, args)), {key: changeable(arg) for key, arg in kwargs.items()}

    def run_on(self, example: ExampleCall) -> Any:
        """What the graph gives for the arguments of a call."""
        gm = cast(fx.GraphModule, self.module)
        return self.run(*place_arguments(gm, (example.args, dict(example.kwargs))))
