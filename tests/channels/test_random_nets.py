"""Random nets: outputs stay, counts are exact, nothing is refused without a reason."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdp_fx.errors import SpecError
from pdp_fx.spec import Allocation
from tests.channels.checks import check_exact
from tests.channels.random_nets import RandomNet, Step, pictures, random_steps

RATIOS = st.sampled_from((0.2, 0.5, 0.7))
ALLOCATIONS = st.sampled_from(("uniform", "global"))
SLOW_TO_DRAW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check(steps: tuple[Step, ...], ratio: float, allocation: Allocation) -> None:
    """The net is exact, or nothing of it can be pruned and the error says why."""
    torch.manual_seed(0)
    net = RandomNet(steps).double()
    try:
        check_exact(net, pictures, ratio, allocation)
    except SpecError as err:
        assert "nothing" in str(err)


@settings(max_examples=200, suppress_health_check=SLOW_TO_DRAW)
@given(random_steps(), RATIOS, ALLOCATIONS)
def test_random_nets_are_exact(steps: tuple[Step, ...], ratio: float, allocation: Allocation) -> None:
    check(steps, ratio, allocation)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=SLOW_TO_DRAW)
@given(random_steps(16), RATIOS, ALLOCATIONS)
def test_many_random_nets_are_exact(steps: tuple[Step, ...], ratio: float, allocation: Allocation) -> None:
    check(steps, ratio, allocation)
