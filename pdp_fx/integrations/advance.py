"""The common part of the callbacks: advancing the schedule if its unit fits."""

from torch import nn

import pdp_fx
from pdp_fx.errors import StateError
from pdp_fx.pruner import find
from pdp_fx.schedule import Unit


def advance(model: nn.Module, unit: Unit) -> None:
    """Call `pdp_fx.step` if the schedule of the prepared model inside `model` counts in units of `unit`.

    Raises:
        StateError: nothing in `model` is prepared.
    """
    found = find(model)
    if found is None:
        raise StateError(
            "the model in training holds no prepared model; prepare it before the trainer gets it"
        )
    if found[1].spec.schedule.per == unit:
        pdp_fx.step(model)
