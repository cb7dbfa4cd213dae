import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import NM, Channels, SpecError, Unstructured
from pdp_fx.granularity import Rule
from pdp_fx.overrides import Overrides
from pdp_fx.passes.choose_targets import Plan
from tests.nets import at_once, listing, net, prepare_until


def plan(name: str, rule: Rule | None, overrides: Overrides = (), inputs: bool = True) -> Plan:
    model, x = net(name)
    _, ctx = prepare_until(model, at_once(rule, overrides), x if inputs else None, "choose-targets")
    return ctx.get(Plan)


def weights(found: Plan) -> dict[str, Rule]:
    return {site.parameter: rule for site, rule in found.weights}


def test_every_weight_gets_the_rule_that_wins() -> None:
    found = plan("small", Unstructured(0.5), {"head": NM(2, 4)})
    assert weights(found) == {"conv.weight": Unstructured(0.5), "head.weight": NM(2, 4)}
    assert (found.groups, found.skipped) == ((), ())


def test_rules_by_type_and_by_none() -> None:
    found = plan("residual", None, {nn.Linear: Unstructured(0.5), "stem": NM(1, 3)})
    assert weights(found) == {"stem.0.weight": NM(1, 3), "fc.weight": Unstructured(0.5)}


def test_channel_groups_get_the_rule_of_their_producers() -> None:
    found = plan("residual", Channels(ratio=0.5), {"fc": None})
    assert [(group.name, rule) for group, rule in found.groups] == [
        ("stem.0", Channels(ratio=0.5)),
        ("expand.0", Channels(ratio=0.5)),
    ]
    assert found.kept == ()
    assert [group.name for group in plan("residual", Channels(ratio=0.5)).kept] == ["fc"]


def test_producers_with_different_rules_keep_their_channels() -> None:
    found = plan("residual", Channels(ratio=0.5), {"project": Channels(ratio=0.25)})
    assert [group.name for group, _ in found.groups] == ["expand.0"]
    (reason,) = next(group.reasons for group in found.kept if group.name == "stem.0")
    assert str(reason) == (
        "%project.0: the spec gives stem.0 and project.0 different rules, but their channels go together; "
        "give both the same Channels rule"
    )


def test_a_producer_that_is_skipped_keeps_its_channels() -> None:
    found = plan("residual", Channels(ratio=0.5), {"expand": None})
    assert [group.name for group, _ in found.groups] == ["stem.0"]


class NormedStream(nn.Module):
    """A residual layer behind a norm, and a hidden layer of its own in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 8), nn.LayerNorm(8)
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.out(torch.relu(self.hidden(self.norm(x)))))


@pytest.mark.parametrize("opened", ["head", "stream"])
def test_a_rule_lets_no_residual_stream_go_but_its_own(opened: str) -> None:
    own = Channels(ratio=0.5, through_norms=True)
    overrides = {"head": own} if opened == "head" else {"stem": own, "out": own}
    spec = at_once(Channels(ratio=0.5), overrides)
    _, ctx = prepare_until(NormedStream(), spec, torch.randn(5, 3), "choose-targets")
    found = ctx.get(Plan)
    streams = [group.name for group, rule in found.groups if rule is own and group.name == "stem"]
    assert streams == ([] if opened == "head" else ["stem"])
    reasons = [str(reason) for group in found.kept if group.name == "stem" for reason in group.reasons]
    assert all("Channels(through_norms=True) gives it masked statistics" in reason for reason in reasons)
    assert len(reasons) == (opened == "head")


def test_a_reader_pruned_in_groups_keeps_its_inputs() -> None:
    found = plan("residual", Channels(ratio=0.5), {"fc": NM(2, 4)})
    (reason,) = next(group.reasons for group in found.kept if group.name == "stem.0")
    assert reason.node == "fc"
    assert "fc.weight is pruned N:M along these channels" in reason.why


def test_groups_that_do_not_fit_are_skipped_with_the_reason() -> None:
    found = plan("small", NM(2, 4))
    assert weights(found) == {"head.weight": NM(2, 4)}
    assert found.skipped == (("conv", "3 input channels do not divide into groups of 4"),)


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.form = nn.Bilinear(6, 6, 5)
        self.fc = nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        read = self.table(tokens)
        return self.fc(self.form(read, read))


def test_weights_that_a_module_keeps_to_itself_are_said() -> None:
    tokens = torch.randint(0, 10, (2, 4))
    _, ctx = prepare_until(Quadratic(), at_once(Unstructured(0.5)), tokens, "choose-targets")
    assert weights(ctx.get(Plan)) == {"fc.weight": Unstructured(0.5)}
    assert ctx.get(Plan).skipped == (
        ("form", "Bilinear uses its weights inside itself, out of reach of a mask"),
    )
    _, ctx = prepare_until(Quadratic(), at_once(Unstructured(0.5), {"form": None}), tokens, "choose-targets")
    assert ctx.get(Plan).skipped == ()


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x) if x.sum() > 0 else x


def test_weights_inside_a_module_that_decides_are_said_with_the_line_that_does() -> None:
    model = nn.Sequential(Skips(), nn.Linear(6, 2))
    _, ctx = prepare_until(model, at_once(Unstructured(0.5)), torch.randn(2, 6), "choose-targets")
    ((name, why),) = ctx.get(Plan).skipped
    assert name == "0"
    assert re.fullmatch(
        r"Skips uses its weights inside itself, out of reach of a mask: "
        r"it branches on the numbers in a tensor \(test_choose_targets.py:\d+\)",
        why,
    )


class SkipsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()) if x.sum() > 0 else x


def test_a_layer_of_one_channel_cannot_lose_channels() -> None:
    with pytest.raises(SpecError, match="nor several channels of one"):
        prepare_until(nn.Linear(6, 1), at_once(Channels(ratio=0.5)), torch.randn(2, 6), "choose-targets")


class SkipsInMethod(SkipsLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.either(x)

    def either(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()) if x.sum() > 0 else x


def test_channels_inside_a_method_that_decides_are_said_with_the_line_that_does() -> None:
    why = r"by this spec:\n  either: either decides by its data what it does: .*so the channels"
    with pytest.raises(SpecError, match=why):
        prepare_until(SkipsInMethod(), at_once(Channels(ratio=0.5)), torch.randn(2, 6), "choose-targets")


def test_channels_inside_a_module_that_decides_are_said_with_the_line_that_does() -> None:
    why = (
        r"SkipsLayers decides by its data what it does: it branches on the numbers in a tensor "
        r"\(test_choose_targets.py:\d+\), so the channels in it stay"
    )
    model = nn.Sequential(SkipsLayers(), nn.Linear(6, 8), nn.Linear(8, 2))
    _, ctx = prepare_until(model, at_once(Channels(ratio=0.5)), torch.randn(2, 6), "choose-targets")
    ((name, said),) = ctx.get(Plan).skipped
    assert name == "0"
    assert re.fullmatch(why, said)
    with pytest.raises(SpecError, match=f"nothing in the model can be pruned by this spec:\n  0: {why}"):
        prepare_until(model[:1], at_once(Channels(ratio=0.5)), torch.randn(2, 6), "choose-targets")


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.table(tokens)) if tokens.sum() > 0 else self.table(tokens)


def test_a_weight_shared_with_a_table_inside_a_module_that_decides_stays() -> None:
    reads, last = Reads(), nn.Linear(6, 10)
    last.weight = reads.table.weight
    model = nn.Sequential(reads, last)
    tokens = torch.randint(1, 10, (2, 4))
    _, ctx = prepare_until(model, at_once(Unstructured(0.5)), tokens, "choose-targets")
    assert weights(ctx.get(Plan)) == {"0.fc.weight": Unstructured(0.5)}
    ((_, why),) = ctx.get(Plan).skipped
    assert why == "0 uses it inside itself, too, out of reach of a mask"


def test_nothing_to_prune_lists_every_reason() -> None:
    with pytest.raises(SpecError) as error:
        plan("small", NM(2, 8))
    assert str(error.value) == (
        "nothing in the model can be pruned by this spec:\n"
        "  conv: 3 input channels do not divide into groups of 8\n"
        "  head: 4 input channels do not divide into groups of 8"
    )


def test_channels_without_example_inputs_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"needs example_inputs: .* write prepare\(model, spec, example_inputs\)"
    ):
        plan("small", Channels(ratio=0.5), inputs=False)


def test_nodes_are_told_their_shapes_and_groups() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "choose-targets")
    notes = {node.name: (node.meta["shape"], node.meta["group"]) for node in gm.graph.nodes}
    assert notes["relu"] == ((2, 4, 4, 4), "conv")
    assert notes["x"] == ((2, 3, 6, 6), "")
    assert len(listing(gm).splitlines()) == 5


@pytest.mark.parametrize(
    ("default", "key", "rule", "skipped"),
    [
        (Unstructured(0.5), "body.bn1", Unstructured(0.9), True),
        (NM(2, 4), "fc", Channels(ratio=0.5), False),
        (Unstructured(0.5), "body", Unstructured(0.9), None),
        (Unstructured(0.5), "body.bn1", None, None),
    ],
)
def test_an_override_that_prunes_nothing_is_told(
    default: Any, key: str, rule: Any, skipped: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential()
    body = nn.Sequential()
    body.add_module("conv", nn.Conv2d(4, 8, 3, padding=1))
    body.add_module("bn1", nn.BatchNorm2d(8))
    model.add_module("body", body)
    model.add_module("pool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(8, 4))
    _, ctx = prepare_until(model, at_once(default, {key: rule}), torch.randn(2, 4, 6, 6), "choose-targets")
    warned = [record.getMessage() for record in caplog.records]
    assert [f"of the override '{key}' prunes nothing" in text for text in warned] == [True] * (
        skipped is not None
    )
    assert (key in dict(ctx.get(Plan).skipped)) == bool(skipped)
