"""Every construct is exact in float64, or its channels stay for the reason that the table gives."""

import pytest
import torch

from pdp_fx.errors import SpecError, TraceError
from pdp_fx.spec import Allocation, Channels
from tests.channels.checks import Outcome, check_exact
from tests.channels.construct import Construct
from tests.channels.constructs import CONSTRUCTS
from tests.channels.known_failures import KNOWN_FAILURES

REFUSALS = ("nothing in the model can be pruned", "nothing would be pruned", "cannot trace the forward")
"""How errors start that refuse a whole model for a reason."""


SETTINGS: tuple[tuple[float, Allocation], ...] = ((0.5, "global"), (0.25, "uniform"), (0.75, "uniform"))
"""Further ratios and allocations."""


def rows() -> list[object]:
    return [
        pytest.param(row, id=row.name, marks=pytest.mark.xfail(strict=True, reason=why) if why else ())
        for row in CONSTRUCTS
        for why in [KNOWN_FAILURES.get(row.name)]
    ]


def outcome_of(row: Construct, ratio: float, allocation: Allocation) -> Outcome:
    """What becomes of a row; a net of which nothing can be pruned has only reasons."""
    torch.manual_seed(0)
    net = row.net().double()
    try:
        rule = Channels(ratio=ratio, through_norms=row.through_norms)
        return check_exact(net, row.inputs, rule, allocation, 3 if row.batches else None)
    except (SpecError, TraceError) as err:
        if not str(err).startswith(REFUSALS):
            raise
        return Outcome(0, (str(err),))


@pytest.mark.parametrize("row", rows())
def test_construct_is_exact_or_refused_with_its_reason(row: Construct) -> None:
    half = outcome_of(row, 0.5, "uniform")
    assert half.removed >= row.removed, f"{half.removed} channels gone; {half.reasons}"
    assert half.removed == 0 or row.removed, f"{half.removed} channels gone, which should stay"
    assert any(row.reason in reason for reason in half.reasons) or not row.reason, f"{half.reasons}"


@pytest.mark.long
@pytest.mark.parametrize("row", rows())
def test_construct_is_exact_in_another_setting(row: Construct) -> None:
    outcome_of(row, *SETTINGS[CONSTRUCTS.index(row) % len(SETTINGS)])


@pytest.mark.slow
@pytest.mark.parametrize("row", rows())
def test_construct_is_exact_in_every_setting(row: Construct) -> None:
    for setting in SETTINGS:
        outcome_of(row, *setting)


def test_names_of_constructs_are_unique() -> None:
    assert len({row.name for row in CONSTRUCTS}) == len(CONSTRUCTS)
