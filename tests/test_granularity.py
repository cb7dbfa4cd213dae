from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from pdp_fx.errors import SpecError
from pdp_fx.granularity import NM, Channels, Rule, Unstructured


@pytest.mark.parametrize("rule", [Unstructured(0.9), NM(2, 4), Channels(0.5), Channels(mac_reduction=0.5)])
def test_a_rule_is_frozen_and_hashes_by_value(rule: Rule) -> None:
    assert hash(rule) == hash(eval(repr(rule)))
    with pytest.raises(FrozenInstanceError):
        rule.ratio = 0.1  # pyright: ignore[reportAttributeAccessIssue]


def test_numbers_of_numpy_become_plain_numbers() -> None:
    assert type(Unstructured(np.float64(0.5)).ratio) is float
    assert type(NM(np.int64(2), np.int64(4)).keep) is int  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (0, r"Unstructured\(ratio=0\) prunes nothing; .* write None as the rule to skip"),
        (-0.5, r"ratio=-0\.5\) prunes nothing"),
        (1.0, r"Unstructured\(ratio=1\) would leave nothing; expected 0 < ratio < 1$"),
        (90, r"would leave nothing; expected 0 < ratio < 1; 90 % is written 0\.9$"),
        (float("nan"), "ratio must be finite, got nan"),
        (10**400, "ratio must be finite"),
        (True, r"ratio must be a number, got True \(bool\)"),
        ("0.9", r"ratio must be a number, got '0\.9' \(str\)"),
        (None, r"ratio must be a number, got None \(NoneType\)"),
    ],
)
def test_an_unstructured_ratio_that_is_no_share_is_refused(ratio: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Unstructured(ratio)


@pytest.mark.parametrize(
    ("keep", "of", "message"),
    [
        (4, 4, r"NM\(4, 4\) keeps every weight; write None"),
        (4, 2, r"the kept count comes first: NM\(2, 4\)"),
        (0, 4, "NM: keep must be 1 or more, got 0"),
        (1, 1, "NM: of must be 2 or more, got 1"),
        (2.0, 4, r"NM: keep must be a whole number, got 2\.0 \(float\)"),
        (True, 4, r"NM: keep must be a whole number, got True \(bool\)"),
    ],
)
def test_an_impossible_n_m_pattern_is_refused(keep: Any, of: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        NM(keep, of)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"exactly one of ratio and mac_reduction, got neither; write Channels\(ratio=0\.5\)"),
        ({"ratio": 0.5, "mac_reduction": 0.5}, "exactly one of ratio and mac_reduction, got both"),
        ({"ratio": 1.0}, r"Channels\(ratio=1\) would leave nothing"),
        ({"mac_reduction": 50}, r"Channels\(mac_reduction=50\) .* 50 % is written 0\.5"),
        ({"mac_reduction": 0}, r"Channels\(mac_reduction=0\) prunes nothing"),
        ({"ratio": 0.5, "round_to": 0}, "Channels: round_to must be 1 or more, got 0"),
        ({"ratio": 0.5, "min_channels": 0}, "Channels: min_channels must be 1 or more, got 0"),
        ({"ratio": 0.5, "round_to": 16.0}, "Channels: round_to must be a whole number"),
    ],
)
def test_impossible_channel_targets_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Channels(**arguments)
