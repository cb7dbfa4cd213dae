import copy
import dataclasses
import pickle
from typing import Any

import pytest
from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.spec import NM, Channels, PruneSpec, Schedule, Unstructured

SPEC = PruneSpec(Unstructured(0.9), {"fc": None, nn.Conv2d: Channels(0.5)}, Schedule.fit(20), tau=1e-3)


def test_the_defaults_are_those_of_the_paper_with_a_guard_on_every_layer() -> None:
    spec = PruneSpec(Unstructured(0.9))
    assert (spec.schedule, spec.tau, spec.allocation) == (Schedule(16, 0.015), 1e-4, "global")
    assert (spec.overrides, spec.min_keep) == ((), 0.25)


def test_equal_specs_hash_alike_however_the_overrides_were_given() -> None:
    pairs = PruneSpec(NM(2, 4), [("fc", None), (nn.Linear, Unstructured(0.5))])
    mapping = PruneSpec(NM(2, 4), {"fc": None, "type:torch.nn.Linear": Unstructured(0.5)})
    assert pairs == mapping
    assert len({pairs, mapping}) == 1


def test_a_spec_cannot_be_changed_in_place() -> None:
    given: dict[str, Any] = {"fc": None}
    spec = PruneSpec(NM(2, 4), given)
    given["conv"] = None
    assert spec.overrides == (("fc", None),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.tau = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_replacing_one_field_keeps_the_others_and_checks_the_new_one() -> None:
    replaced = dataclasses.replace(SPEC, tau=1e-5)
    assert (replaced.tau, replaced.overrides) == (1e-5, SPEC.overrides)
    with pytest.raises(SpecError, match="tau must be at least 1e-30"):
        dataclasses.replace(SPEC, tau=0)


def test_a_spec_survives_pickle_and_deepcopy() -> None:
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC
    assert copy.deepcopy(SPEC) == SPEC


def test_without_a_default_only_the_overrides_prune() -> None:
    spec = PruneSpec(None, {"fc": NM(2, 4)})
    assert spec.rule_for("fc", nn.Linear) == NM(2, 4)
    assert spec.rule_for("conv", nn.Conv2d) is None


@pytest.mark.parametrize("min_keep", [0, 0.5, 1])
def test_the_guard_may_be_anything_from_off_to_uniform(min_keep: float) -> None:
    assert PruneSpec(NM(2, 4), min_keep=min_keep).min_keep == min_keep


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"default": 0.9}, r"default must be Unstructured, NM, .*got 0\.9 .*write Unstructured\(0\.9\)"),
        ({"default": None}, "nothing would be pruned, .*no override has a rule; write for example"),
        ({"default": None, "overrides": {"fc": None}}, "nothing would be pruned"),
        ({"default": NM(2, 4), "schedule": 16}, r"schedule must be a Schedule, got 16 \(int\)"),
        ({"default": NM(2, 4), "tau": 0}, "tau must be at least 1e-30, got 0; the paper's value is 1e-4"),
        ({"default": NM(2, 4), "tau": -1e-4}, "tau must be at least 1e-30, got -0.0001"),
        ({"default": NM(2, 4), "tau": float("inf")}, "tau must be finite, got inf"),
        (
            {"default": NM(2, 4), "tau": "auto"},
            "tau must be a number, or a text like 'rel:0.1' with one, of at least 1e-30, got 'auto'",
        ),
        ({"default": NM(2, 4), "tau": "rel:-1"}, "tau must be .*, got 'rel:-1'"),
        ({"default": NM(2, 4), "tau": None}, "tau must be a number, got None"),
        ({"default": NM(2, 4), "tau": 1e-40}, "tau must be at least 1e-30, got 1e-40"),
        ({"default": NM(2, 4), "tau": "rel:1e-45"}, "tau must be .*, got 'rel:1e-45'"),
        ({"default": NM(2, 4), "tau_end": 1e-42}, "tau_end must be at least 1e-30, got 1e-42"),
        ({"default": NM(2, 4), "tau_end": 0}, "tau_end must be at least 1e-30, got 0; leave it out"),
        ({"default": NM(2, 4), "forward": "firm"}, "forward must be"),
        (
            {"default": NM(2, 4), "min_keep": 1.5},
            r"min_keep must lie between 0 \(unguarded\) and 1 \(uniform\), got 1\.5",
        ),
        ({"default": NM(2, 4), "min_keep": -0.1}, "min_keep must lie between 0"),
        (
            {"default": NM(2, 4), "allocation": "globl"},
            "must be 'global' or 'dynamic' or 'uniform', got 'globl' .*did you mean 'global'",
        ),
        ({"default": NM(2, 4), "allocation": None}, "must be 'global' or 'dynamic' or 'uniform', got None"),
    ],
)
def test_an_impossible_spec_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PruneSpec(**arguments)
