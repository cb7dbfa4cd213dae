"""Random nets and layouts: outputs stay, counts are exact, nothing is refused without a reason."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdp_fx
from pdp_fx import Channels
from pdp_fx.errors import SpecError
from pdp_fx.spec import Allocation
from tests.channels.checks import EXACT, check_exact, compare_where_both_work, halved
from tests.channels.constructs import CONSTRUCTS
from tests.channels.found import FOUND, Found
from tests.channels.known_failures import KNOWN_FAILURES
from tests.channels.random_layouts import LayoutNet, random_layouts
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


EXAMPLES = st.sampled_from(
    (
        (2, 2, 2),
        (4, 4, 4),
        (2, 4, 4),
        (3, 6, 2),
        (2, 3, 2),
        (4, 2, 3),
        (5, 7, 3),
        (1, 5, 7),
        (1, 4, 6),
        (1, 2, 2),
        (1, 1, 1),
        (1, 1, 4),
        (2, 3, 1),
    )
)
"""Batch, height and width of an example; some are equal by chance, or divide numbers of channels."""

ELSEWHERE = ((1, 2, 2), (2, 3, 4), (4, 3, 2), (3, 2, 5), (5, 7, 3))


def check_layout(net: LayoutNet, example: tuple[int, int, int]) -> None:
    """What is removed changes nothing, at other sizes than the example's, too."""
    torch.manual_seed(0)
    net.take_only(*example[1:])
    prepared = halved(net, images_of(example))
    converted = pdp_fx.convert(prepared.eval())
    other_batches = [(batch, *example[1:]) for batch in (1, 2, 3, 4, 6)]
    for sizes in (example, *other_batches, *ELSEWHERE):
        compare_where_both_work(prepared, converted, images_of(sizes), EXACT)


def images_of(sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Images of these sizes."""
    return (torch.randn(sizes[0], 3, *sizes[1:], dtype=torch.float64),)


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=SLOW_TO_DRAW)
@given(random_layouts(), EXAMPLES)
def test_random_layouts_are_exact_at_other_sizes(net: LayoutNet, example: tuple[int, int, int]) -> None:
    check_layout(net, example)


@pytest.mark.slow
@settings(max_examples=2000, suppress_health_check=SLOW_TO_DRAW)
@given(random_layouts(), EXAMPLES)
def test_many_random_layouts_are_exact_at_other_sizes(net: LayoutNet, example: tuple[int, int, int]) -> None:
    check_layout(net, example)


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
