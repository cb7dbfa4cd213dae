"""Random nets: outputs stay, counts are exact, nothing is refused without a reason."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdp_fx.errors import SpecError
from pdp_fx.spec import Allocation, Channels
from tests.channels.checks import check_exact
from tests.channels.constructs import CONSTRUCTS
from tests.channels.found import FOUND, Found
from tests.channels.known_failures import KNOWN_FAILURES
from tests.channels.random_nets import RandomNet, Step, pictures, random_steps
from tests.channels.test_constructs import REFUSALS

RULES = st.builds(Channels, ratio=st.sampled_from((0.2, 0.5, 0.7)), through_norms=st.booleans())
ALLOCATIONS = st.sampled_from(("uniform", "global"))
SLOW_TO_DRAW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check(steps: tuple[Step, ...], rule: Channels, allocation: Allocation) -> None:
    """The net is exact, or nothing of it can be pruned and the error says why."""
    torch.manual_seed(0)
    net = RandomNet(steps).double()
    try:
        check_exact(net, pictures, rule, allocation)
    except SpecError as err:
        if not str(err).startswith(REFUSALS):
            raise


@settings(max_examples=200, suppress_health_check=SLOW_TO_DRAW)
@given(random_steps(), RULES, ALLOCATIONS)
def test_random_nets_are_exact(steps: tuple[Step, ...], rule: Channels, allocation: Allocation) -> None:
    check(steps, rule, allocation)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=SLOW_TO_DRAW)
@given(random_steps(16), RULES, ALLOCATIONS)
def test_many_random_nets_are_exact(steps: tuple[Step, ...], rule: Channels, allocation: Allocation) -> None:
    check(steps, rule, allocation)


def found() -> list[object]:
    return [
        pytest.param(net, id=net.name, marks=pytest.mark.xfail(strict=True, reason=why) if why else ())
        for net in FOUND
        for why in [KNOWN_FAILURES.get(net.name)]
    ]


@pytest.mark.parametrize("net", found())
def test_a_net_that_once_failed_is_exact(net: Found) -> None:
    check(net.steps, net.rule, net.allocation)


def test_known_failures_are_rows_that_exist() -> None:
    assert {net.name for net in FOUND} | {row.name for row in CONSTRUCTS} >= set(KNOWN_FAILURES)
