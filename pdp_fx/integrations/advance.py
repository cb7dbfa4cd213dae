"""The common part of the callbacks: advancing the schedule if its unit fits."""

from torch import fx, nn

import pdp_fx
from pdp_fx.errors import StateError
from pdp_fx.pruner import find_all
from pdp_fx.schedule import Unit


def advance(model: nn.Module, unit: Unit) -> None:
    """Call `pdp_fx.step` for the prepared models inside `model` whose schedules count in units of `unit`.

    Raises:
        StateError: as for `counting`.
    """
    for gm in counting(model, unit):
        pdp_fx.step(gm)


def counting(model: nn.Module, unit: Unit) -> list[fx.GraphModule]:
    """The prepared models inside `model` whose schedules count in units of `unit`.

    Raises:
        StateError: nothing in `model` is prepared.
    """
    found = find_all(model)
    if not found:
        raise StateError(
            "the model in training holds no prepared model; prepare it before the trainer gets it"
        )
    return [gm for gm, pruner in found if pruner.spec.schedule.per == unit]
