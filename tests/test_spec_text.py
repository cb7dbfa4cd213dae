import json
import re
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdp_fx.errors import SpecError
from pdp_fx.spec import NM, Channels, PruneSpec, Rule, Schedule, Unstructured

FULL = PruneSpec(
    Unstructured(0.9),
    {"fc": None, "re:layer4.*": NM(2, 4), nn.Linear: Channels(mac_reduction=0.5, round_to=16)},
    Schedule(16, 0.015, length=120),
)
DEFAULT: dict[str, Any] = {"unstructured": {"ratio": 0.9}}

shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
counts = st.integers(1, 10**6)
rules: st.SearchStrategy[Rule] = st.one_of(
    shares.map(Unstructured),
    st.tuples(counts, counts).map(lambda pair: NM(min(pair), sum(pair))),
    st.builds(Channels, ratio=shares, round_to=counts, min_channels=counts, through_norms=st.booleans()),
    st.builds(Channels, mac_reduction=shares, round_to=counts, min_channels=counts),
)


def compiles(regex: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(regex)
    except (re.error, OverflowError):
        return False
    return True


nasty = st.text(st.one_of(st.sampled_from(r""".*+?\d"'[]()#=,{}"""), st.characters(codec="utf-8")))
names = nasty.filter(lambda name: name != "" and not name.startswith(("re:", "type:")))
regexes = st.one_of(nasty.map(re.escape), nasty.filter(compiles)).map("re:{}".format)
types = st.sampled_from([nn.Linear, nn.Conv2d, nn.Module, nn.modules.conv.Conv1d])
schedules = st.builds(
    Schedule,
    start=st.integers(0, 500),
    epsilon=st.floats(1e-9, 1),
    per=st.sampled_from(["epoch", "step"]),
    shape=st.sampled_from(["linear", "cubic"]),
)
specs = st.builds(
    PruneSpec,
    rules,
    st.dictionaries(st.one_of(names, regexes, types), st.one_of(st.none(), rules), max_size=5),
    st.one_of(schedules, st.integers(2, 500).map(Schedule.fit)),
    tau=st.one_of(st.floats(1e-30, 1e6), st.floats(1e-9, 1e3).map("rel:{}".format)),
    allocation=st.sampled_from(["global", "dynamic", "uniform"]),
    min_keep=st.floats(0, 1),
    tau_end=st.one_of(st.none(), st.floats(1e-30, 1e6)),
    forward=st.sampled_from(["soft", "hard"]),
)


@pytest.mark.filterwarnings("ignore:Possible (nested set|set):FutureWarning")
@given(spec=specs, decay=st.sampled_from([0.0, 2e-4]))
def test_any_spec_comes_back_unchanged_from_dict_json_and_toml(spec: PruneSpec, decay: float) -> None:
    if any(isinstance(rule, Unstructured | NM) for rule in (spec.default, *dict(spec.overrides).values())):
        spec = replace(spec, pruned_decay=decay)
    assert PruneSpec.from_dict(spec.to_dict()) == spec
    assert PruneSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert PruneSpec.from_toml(spec.to_toml()) == spec


@pytest.mark.parametrize(
    "key",
    [
        r"re:layer\d+\.(conv|bn)[12]",
        r're:"quoted"|\'single\'',
        r"re:\\backslash\\",
        "re:tab\tnewline\nreturn\r\nnul\0del\x7f",
        "re:[#=,{}]",
        "re:émoji 😀 \u2028",
        r"re:\u0041\x41\N{BULLET}",
        "layer1.0.conv1",
        "a-b_c",
        "3",
        "true",
        " ",
    ],
)
def test_a_nasty_key_comes_back_from_toml_and_keeps_its_place(key: str) -> None:
    spec = PruneSpec(NM(1, 4), [("first", None), (key, Unstructured(0.5)), ("re:last", None)])
    assert PruneSpec.from_toml(spec.to_toml()).overrides == spec.overrides
    assert list(tomllib.loads(spec.to_toml())["overrides"]) == ["first", key, "re:last"]


def test_the_dict_holds_plain_values_and_leaves_out_none_options() -> None:
    assert FULL.to_dict() == {
        "default": {"unstructured": {"ratio": 0.9}},
        "tau": 1e-4,
        "allocation": "global",
        "min_keep": 0.25,
        "schedule": {"start": 16, "epsilon": 0.015, "per": "epoch", "length": 120, "shape": "linear"},
        "overrides": {
            "fc": None,
            "re:layer4.*": {"nm": {"keep": 2, "of": 4}},
            "type:torch.nn.Linear": {
                "channels": {
                    "mac_reduction": 0.5,
                    "round_to": 16,
                    "min_channels": 1,
                    "through_norms": False,
                }
            },
        },
    }


def test_the_toml_text_reads_like_one_written_by_hand() -> None:
    assert FULL.to_toml() == (
        "tau = 0.0001\n"
        'allocation = "global"\n'
        "min_keep = 0.25\n"
        "\n[default]\n"
        "unstructured = { ratio = 0.9 }\n"
        "\n[schedule]\n"
        "start = 16\n"
        "epsilon = 0.015\n"
        'per = "epoch"\n'
        "length = 120\n"
        'shape = "linear"\n'
        "\n[overrides]\n"
        'fc = "skip"\n'
        '"re:layer4.*" = { nm = { keep = 2, of = 4 } }\n'
        '"type:torch.nn.Linear" = { channels = { mac_reduction = 0.5, round_to = 16, min_channels = 1, '
        "through_norms = false } }\n"
    )


def test_skip_stands_for_none_wherever_a_rule_may_stand() -> None:
    spec = PruneSpec(None, {"conv": NM(2, 4), "fc": None})
    assert 'default = "skip"\n' in spec.to_toml()
    assert PruneSpec.from_toml(spec.to_toml()) == spec
    assert PruneSpec.from_dict({"default": "skip", "overrides": {"conv": {"nm": {"keep": 2, "of": 4}}}}) == (
        PruneSpec(None, {"conv": NM(2, 4)})
    )


def test_left_out_keys_take_the_defaults() -> None:
    assert PruneSpec.from_dict({"default": DEFAULT}) == PruneSpec(Unstructured(0.9))


NO_SPECS: list[tuple[Any, str]] = [
    ({}, "the spec lacks the key 'default'; it accepts default, overrides, schedule, tau"),
    ({"defualt": DEFAULT}, "unknown key 'defualt'; it accepts default, .*; did you mean 'default'"),
    ({"default": DEFAULT, 3: 1}, r"the spec must have strings as keys, got 3 \(int\)"),
    ({"default": 0.9}, r'default must be a table that names one rule, got 0\.9 .*write \{"unstructured"'),
    ({"default": "skipp"}, "default must be a table that names one rule, got 'skipp'"),
    ({"default": {}}, "default must name exactly one rule, got none"),
    ({"default": DEFAULT | {"nm": {}}}, "must name exactly one rule, got unstructured, nm"),
    (
        {"default": {"unstructred": {}}},
        "it accepts unstructured, nm, channels; did you mean 'unstructured'",
    ),
    ({"default": {"unstructured": {}}}, "default.unstructured lacks the key 'ratio'"),
    ({"default": {"unstructured": 0.9}}, "default.unstructured must be a table of keys and values"),
    ({"default": {"nm": {"keep": 2, "off": 4}}}, "default.nm has the unknown key 'off'.*mean 'of'"),
    ({"default": {"nm": {"keep": 4, "of": 4}}}, r"in default.nm: NM\(4, 4\) keeps every weight"),
    (
        {"default": {"nm": {"keep": 2, "of": "4"}}},
        "in default.nm: NM: of must be a whole number, got '4'",
    ),
    (
        {"default": DEFAULT, "tau": "1e-4"},
        "in the spec: PruneSpec: tau must be a number, or a text like 'rel:0.1' with one, of at least 1e-30",
    ),
    (
        {"default": DEFAULT, "schedule": {"begin": 1}},
        "schedule has the unknown key 'begin'; it accepts start",
    ),
    ({"default": DEFAULT, "schedule": 16}, "schedule must be a table of keys and values, got 16"),
    ({"default": DEFAULT, "schedule": {"start": 9, "length": 9}}, "in schedule: .*write length=77"),
    ({"default": DEFAULT, "overrides": ["fc"]}, "overrides must be a table"),
    (
        {"default": DEFAULT, "overrides": {"fc": 1}},
        r"overrides\['fc'\] must be a table that names one rule",
    ),
    (
        {"default": DEFAULT, "overrides": {"fc": {"nm": {"n": 2}}}},
        r"overrides\['fc'\]\.nm has the unknown",
    ),
    (
        {"default": DEFAULT, "overrides": {"re:(": None}},
        r"in the spec: overrides: 're:\(' is not a regular",
    ),
    ([], r"the spec must be a table of keys and values, got \[\] \(list\)"),
]


@pytest.mark.parametrize(("values", "message"), NO_SPECS)
def test_a_dict_that_is_no_spec_is_refused_by_the_name_of_the_key(values: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PruneSpec.from_dict(values)


def test_a_class_that_cannot_be_imported_by_name_is_not_written_to_a_file() -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(SpecError, match="Local' cannot be written to a file, .*at the top level of a module"):
        PruneSpec(NM(2, 4), {Local: None}).to_dict()


def test_a_class_whose_name_now_means_another_class_is_not_written_to_a_file() -> None:
    impostor = type("Linear", (nn.Module,), {"__module__": "torch.nn", "__qualname__": "Linear"})
    with pytest.raises(SpecError, match="cannot be written to a file, because that name is another class"):
        PruneSpec(NM(2, 4), {impostor: None}).to_toml()


def test_a_spec_is_loaded_from_a_toml_or_json_file(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(FULL.to_toml(), encoding="utf-8")
    (tmp_path / "spec.json").write_text(json.dumps(FULL.to_dict()), encoding="utf-8")
    assert PruneSpec.load(tmp_path / "spec.toml") == FULL
    assert PruneSpec.load(str(tmp_path / "spec.json")) == FULL


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("spec.yaml", b"", r"spec\.yaml: a spec is read from a file that ends in \.toml or \.json"),
        ("spec", b"", r"spec: a spec is read from a file that ends in \.toml or \.json"),
        ("spec.toml", b"= 1", r"spec\.toml: the text is not valid TOML: .*line 1"),
        ("spec.json", b"{", r"spec\.json: the text is not valid JSON: .*line 1"),
        ("spec.json", b'{"tau": 1, "tau": 2}', r"spec\.json: the key 'tau' is given twice"),
        ("spec.json", b"[]", r"spec\.json: the spec must be a table"),
        ("spec.toml", b"tau = 1", r"spec\.toml: the spec lacks the key 'default'"),
        ("spec.toml", b"\xff", r"spec\.toml: the text is not UTF-8"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_by_its_name(
    tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SpecError, match=message):
        PruneSpec.load(tmp_path / name)
