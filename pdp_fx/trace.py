"""From a model to a graph that shares its parameters."""

from typing import Any

import torch
from torch import fx, nn

from pdp_fx.tracing.module import TracedModule, mirror
from pdp_fx.tracing.symbolic import symbolic_graph

ExampleInputs = torch.Tensor | tuple[Any, ...] | dict[str, Any] | None


def trace(model: nn.Module, example_inputs: ExampleInputs = None) -> fx.GraphModule:
    """Trace a model into a graph module that computes the same and shares its parameters and layers.

    Args:
        model: any module; it is not modified.
        example_inputs: one tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        TraceError: the model cannot be traced; the message says where and why.
    """
    graph = symbolic_graph(model)
    return TracedModule(mirror(model), graph, type(model).__name__)
