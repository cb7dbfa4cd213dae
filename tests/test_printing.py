"""What people read of a graph, held by the golden texts in `golden`.

After a wanted change, run with UPDATE_GOLDEN=1 and read the difference.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Unstructured
from pdp_fx.compiler import Pass
from pdp_fx.granularity import Rule
from pdp_fx.printing import graph_text
from tests.nets import at_once, net
from tests.printed_net import Printed

GOLDEN = Path(__file__).parent / "golden"
IMAGES = torch.ones(2, 3, 4, 4)
RULES: dict[str, Rule] = {"unstructured": Unstructured(0.5), "channels": Channels(ratio=0.5)}


def assert_golden(text: str, name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


def prepared(rule: Rule) -> fx.GraphModule:
    return pdp_fx.prepare(Printed(), at_once(rule), IMAGES)


def row(text: str, node: str) -> str:
    return next(line for line in text.splitlines() if line.split(maxsplit=1)[:1] == [node])


def test_a_plain_model_prints_as_its_golden_text() -> None:
    assert_golden(graph_text(Printed(), IMAGES), "plain")


@pytest.mark.parametrize("name", RULES)
def test_a_prepared_model_prints_as_its_golden_text(name: str) -> None:
    assert_golden(graph_text(prepared(RULES[name])), f"prepared_{name}")


@pytest.mark.parametrize("name", RULES)
def test_a_converted_model_prints_as_its_golden_text(name: str) -> None:
    model = prepared(RULES[name])
    pdp_fx.step(model)
    assert_golden(graph_text(pdp_fx.convert(model), IMAGES), f"converted_{name}")


def test_the_text_is_the_same_at_every_call() -> None:
    assert graph_text(prepared(Unstructured(0.5))) == graph_text(prepared(Unstructured(0.5)))


def test_print_graph_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    model = prepared(Unstructured(0.5))
    pdp_fx.print_graph(model)
    assert capsys.readouterr().out == graph_text(model) + "\n"


def test_a_mask_is_starred_and_says_how_much_it_prunes_now() -> None:
    model = prepared(Unstructured(0.5))
    assert "* WeightMask" in row(graph_text(model), "conv_weight_masked")
    assert "weights, 0 of 216 pruned" in row(graph_text(model), "conv_weight_masked")
    pdp_fx.step(model)
    assert "of 216 pruned" in row(graph_text(model), "conv_weight_masked")
    assert "weights, 0 of" not in graph_text(model)


def test_a_node_says_which_of_its_inputs_are_masked() -> None:
    header, *_ = text = graph_text(prepared(Channels(ratio=0.5))).splitlines()
    column = slice(header.index("mask"), header.index("source"))
    assert row("\n".join(text), "bn")[column].strip() == "weight, bias"
    assert row("\n".join(text), "conv")[column].strip() == ""


def test_an_n_m_mask_shows_its_pattern_and_its_ramp() -> None:
    spec = PruneSpec(NM(2, 4), schedule=pdp_fx.Schedule(start=0, epsilon=0.5))
    model = pdp_fx.prepare(net("mlp")[0], spec)
    pdp_fx.step(model)
    assert "2:4, 1 of 4 pruned" in row(graph_text(model), "fc1_weight_masked")


def test_shapes_are_measured_without_a_trace_in_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    text = graph_text(model, torch.ones(3, 4))
    assert "3x2" in row(text, "output")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Functions(nn.Module):
    """Calls functions whose default text holds an address."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(torch.clamp(x, min=0.0), x.sigmoid())


def test_no_text_holds_an_address() -> None:
    assert "0x" not in graph_text(Functions(), torch.ones(2))


def test_graph_diff_shows_what_each_pass_has_changed() -> None:
    diffs: dict[str, str] = {}

    def note(before: str, step: Pass, gm: fx.GraphModule) -> None:
        diffs[step.name] = pdp_fx.graph_diff(before, gm)

    model = pdp_fx.prepare(Printed(), at_once(Unstructured(0.5)), IMAGES, on_pass=note)
    assert [name for name, diff in diffs.items() if diff] == ["expose-parameters", "mask-weights"]
    assert_golden(diffs["mask-weights"], "diff_mask_weights")
    diffs.clear()
    pdp_fx.step(model)
    pdp_fx.convert(model, on_pass=note)
    assert "call_module[target=bn]" in diffs["fold-batch-norm"]
    assert diffs["verify-equivalence"] == ""


def test_a_wrapped_model_prints_like_the_prepared_one_in_it() -> None:
    prepared = pdp_fx.prepare(nn.Linear(4, 4), PruneSpec(Unstructured(0.5)), torch.randn(2, 4))
    assert graph_text(nn.Sequential(prepared)) == graph_text(prepared)
