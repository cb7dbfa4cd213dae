"""Histograms of weights: every unit is counted once, and what is pruned is told apart."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import pdp_fx
from benchmarks.histograms import BINS, histogram, noted
from pdp_fx import Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.spec import Rule


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize(
    ("rule", "units", "left"), [(Unstructured(0.5), 504, 252), (Channels(ratio=0.5), 8, 4)]
)
def test_every_unit_is_counted_and_those_that_are_left_too(rule: Rule, units: int, left: int) -> None:
    spec = PruneSpec(rule, schedule=Schedule(0, 1.0))
    model = pdp_fx.prepare(net(), spec, torch.zeros(2, 3, 8, 8))
    before = histogram(model, 0)
    assert before["counts"] == before["left"]
    pdp_fx.step(model)
    found = histogram(model, 3)
    assert found["epoch"] == 3
    assert len(found["counts"]) == len(found["left"]) == BINS
    assert (sum(found["counts"]), sum(found["left"])) == (units, left)
    assert all(few <= many for few, many in zip(found["left"], found["counts"], strict=True))
    assert len(json.dumps(found)) < 700


def test_a_dense_model_has_one_too_and_so_has_one_that_diverged() -> None:
    model = net()
    found = histogram(model, 1)
    assert found["counts"] == found["left"]
    assert sum(found["counts"]) == 504
    assert found["counts"][0] < found["counts"][BINS // 2]
    with torch.no_grad():
        model.get_parameter("0.weight")[0] = torch.nan
    assert sum(histogram(model, 1)["counts"]) == 504
    nn.init.zeros_(model.get_parameter("0.weight"))
    nn.init.zeros_(model.get_parameter("3.weight"))
    assert histogram(model, 1)["counts"][BINS // 2] == 504


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_weights_have_one_whose_squares_are_beyond_float32(size: float) -> None:
    model = net()
    model.get_parameter("0.weight").data[0] = size
    found = histogram(model, 1)
    assert sum(found["counts"]) == 504
    assert found["counts"][-1] == 27
    assert found["reach"] == pytest.approx(4 * size * (27 / 504) ** 0.5, rel=1e-5)


def test_weights_are_noted_after_each_quarter() -> None:
    assert noted(120) == (30, 60, 90, 120)
    assert noted(3) == (1, 2, 3)
    assert noted(1) == (1,)
