from typing import Any

import pytest
from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.granularity import NM, Rule, Unstructured
from pdp_fx.spec import PruneSpec

DEFAULT, FIRST, SECOND = Unstructured(0.1), Unstructured(0.2), NM(2, 4)


def rule_for(overrides: Any, name: str, module: nn.Module | type[nn.Module] = nn.Conv2d) -> Rule | None:
    return PruneSpec(DEFAULT, overrides).rule_for(name, module)


def net() -> dict[str, nn.Module]:
    conv, norm, linear = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)
    layer = nn.Sequential(conv, norm)
    root = nn.Sequential(layer, linear)
    return {"": root, "layer1": layer, "layer1.conv1": conv, "layer1.bn1": norm, "fc": linear}


@pytest.mark.parametrize(
    ("overrides", "name", "expected"),
    [
        ({}, "fc", DEFAULT),
        ({"fc": FIRST}, "fc", FIRST),
        ({"fc": None}, "fc", None),
        ({"fc": FIRST}, "fc2", DEFAULT),
        ({"layer1": FIRST}, "layer1.0.conv1", FIRST),
        ({"layer1": FIRST}, "layer10.0.conv1", DEFAULT),
        ({"layer1": FIRST, "layer1.0": SECOND}, "layer1.0.conv1", SECOND),
        ({"layer1.0": SECOND, "layer1": FIRST}, "layer1.0.conv1", SECOND),
        ({"layer1": FIRST, "layer1.0": None}, "layer1.0.conv1", None),
        ({r"re:.*\.conv1": FIRST}, "layer1.0.conv1", FIRST),
        ({"re:conv1": FIRST}, "layer1.0.conv1", DEFAULT),
        ({"re:layer1": FIRST}, "layer1.0.conv1", DEFAULT),
        ({"re:.*conv1": FIRST, "re:layer1.*": SECOND}, "layer1.0.conv1", FIRST),
        ({"re:layer1.*": SECOND, "re:.*conv1": FIRST}, "layer1.0.conv1", SECOND),
        ({nn.Conv2d: FIRST}, "conv", FIRST),
        ({nn.Linear: FIRST}, "conv", DEFAULT),
        ({nn.Module: FIRST, nn.Conv2d: SECOND}, "conv", FIRST),
        ({"type:torch.nn.Conv2d": FIRST}, "conv", FIRST),
        ({nn.Conv2d: FIRST, "re:conv": SECOND}, "conv", SECOND),
        ({"re:conv": FIRST, "conv": SECOND}, "conv", SECOND),
        ({nn.Conv2d: FIRST, "re:conv": FIRST, "conv": None}, "conv", None),
        ([("fc", FIRST), (nn.Conv2d, SECOND)], "fc", FIRST),
    ],
)
def test_names_win_over_regexes_over_types_over_the_default(
    overrides: Any, name: str, expected: Rule | None
) -> None:
    assert rule_for(overrides, name) == expected


def test_a_type_also_matches_instances_and_subclasses() -> None:
    class MyConv(nn.Conv2d):
        pass

    assert rule_for({nn.Conv2d: FIRST}, "conv", MyConv) == FIRST
    assert rule_for({nn.Conv2d: FIRST}, "conv", MyConv(1, 1, 1)) == FIRST
    assert rule_for({MyConv: FIRST}, "conv", nn.Conv2d) == DEFAULT


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"re:layer(": None}, r"'re:layer\(' is not a regular expression: .*position 5"),
        ({"": None}, "the empty name stands for the whole model; give the rule as the default"),
        ({3: None}, r"a key must be a module name, 're:<regex>' or .*, got 3 \(int\)"),
        ({int: None}, "a key must be .* a subclass of torch.nn.Module, got <class 'int'>"),
        ({"type:Linear": None}, "cannot be imported .*; did you mean 'type:torch.nn.Linear'"),
        ({"type:torch.nn.Conv22d": None}, "cannot be imported .*; did you mean 'type:torch.nn.Conv2d'"),
        ({"type:torch.Tensor": None}, "is no subclass of torch.nn.Module; write for example"),
        ({"type:": None}, "cannot be imported"),
        ({"fc": 0.9}, r"overrides\['fc'\] must be Unstructured.*got 0\.9 .*write Unstructured\(0\.9\)"),
        ({nn.Linear: NM}, r"overrides\['type:torch\.nn\.Linear'\] must be Unstructured"),
        ([("fc", None), ("fc", FIRST)], r"overrides\['fc'\] is given twice"),
        ([(nn.Linear, None), ("type:torch.nn.Linear", FIRST)], r"Linear'\] is given twice"),
        ("fc", r"overrides must map keys to rules, got 'fc'"),
        (None, r"overrides must map keys to rules, got None"),
        (["fc"], r"overrides must be pairs of a key and a rule, got 'fc' among them"),
        ([("fc", None, 1)], r"overrides must be pairs of a key and a rule"),
    ],
)
def test_impossible_overrides_are_refused(overrides: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PruneSpec(DEFAULT, overrides)


@pytest.mark.parametrize("key", ["fc", "layer1", r"re:.*conv\d", nn.Linear, nn.modules.batchnorm.BatchNorm2d])
def test_a_key_that_matches_some_module_passes_the_check(key: Any) -> None:
    PruneSpec(DEFAULT, {key: None}).check_matches(net())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("fcc", "'fcc'; did you mean 'fc'"),
        ("layer1.conv1.weight", "'layer1.conv1.weight'; did you mean 'layer1.conv1'"),
        ("layer1.*", r"'layer1\.\*'; that is no module name: start a pattern with 're:'"),
        ("re:conv1", r"must match the whole name: write 're:\.\*\(\?:conv1\)\.\*' to match 'layer1\.conv1'"),
        ("re:layr1", "'re:layr1'; did you mean 'layer1'"),
        (nn.Conv1d, r"'type:torch\.nn\.Conv1d'; did you mean 'type:torch\.nn\.Conv2d'"),
        ("backbone.stages", r"'backbone\.stages'\n"),
        ("re:layer.", r"'layer1' holds layers and no weights of its own: write 're:\(\?:layer\.\)"),
        ("re:", "that is the whole model: give the rule as the default"),
    ],
)
def test_a_key_that_matches_nothing_is_refused_with_what_comes_close(key: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PruneSpec(DEFAULT, {key: None}).check_matches(net())


def test_a_type_of_modules_that_only_hold_layers_is_refused() -> None:
    """None would skip nothing in them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    spec = PruneSpec(DEFAULT, {nn.Sequential: None})
    with pytest.raises(SpecError, match="that is the whole model"):
        spec.check_matches(dict(model.named_modules()))
    with pytest.raises(SpecError, match="'0' holds layers and no weights of its own: write '0', a name"):
        spec.check_matches(dict(model[:1].named_children()))
    PruneSpec(DEFAULT, {r"re:(?:0)\..*": None}).check_matches(dict(model.named_modules()))


def test_all_keys_that_match_nothing_are_named_at_once_and_no_others() -> None:
    spec = PruneSpec(DEFAULT, {"fcc": None, "fc": None, "head": None})
    with pytest.raises(SpecError) as refusal:
        spec.check_matches(net())
    assert "'fcc'" in str(refusal.value)
    assert "'head'" in str(refusal.value)
    assert "  'fc'" not in str(refusal.value)


def test_the_regex_offered_for_a_partial_match_does_match() -> None:
    PruneSpec(DEFAULT, {"re:.*(?:conv1).*": None}).check_matches(net())
