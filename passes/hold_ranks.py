"""Let a converted graph take no inputs with more or fewer axes than the example where it is wrong on these.

Which channels can go is found on the example. A mean over axis 1, say, runs over other things in a single
example without the axis of the batch, and the masked model does something else there than the smaller one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pdp_fx.channels.kept import checked_before, placed_before
from pdp_fx.compiler import Context, Pass
from pdp_fx.passes.verify_equivalence import Reference
from pdp_fx.tracing.examples import Inputs
from pdp_fx.tracing.inputs import place_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HoldRanks(Pass):
    """Checks how many axes inputs have if the outputs on others are not those of the prepared model."""

    name: ClassVar[str] = "hold-ranks"
    calls: ClassVar[bool] = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> bool:
        reference = ctx.find(Reference)
        if reference is None or ctx.example_inputs is None:
            return False
        if all(_is_right(gm, reference, *other) for other in reference.ranks):
            return False
        logger.info("the converted model is held to as many axes as the example inputs have")
        return _hold(gm, ctx.example_inputs)


def _is_right(
    gm: fx.GraphModule, reference: Reference, inputs: Inputs, wanted: tuple[torch.Tensor, ...]
) -> bool:
    """Whether the graph gives what the prepared model gives, or refuses it."""
    try:
        difference = reference.difference(gm, inputs, wanted)
    except Exception as err:  # noqa: BLE001 it holds for inputs like those that the user has given
        logger.info("refuses another number of axes: %s", err)
        return True
    return difference <= reference.tolerance


def _hold(gm: fx.GraphModule, inputs: Inputs) -> bool:
    """Check the number of axes of each input that is a tensor; returns whether there is any."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    first = placeholders[-1].next
    tensors = [
        (node, given)
        for node, given in zip(placeholders, place_arguments(gm, inputs), strict=True)
        if isinstance(given, torch.Tensor)
    ]
    for node, given in tensors:
        message = (
            f"{node.target} has {given.ndim} axes in the example inputs, and with another number this model "
            "is not the prepared one; convert one that was prepared with example_inputs of the kind you need"
        )
        checked_before(first, placed_before(first, "dim", node), given.ndim, message)
    return bool(tensors)
