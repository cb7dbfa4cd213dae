"""What stays, because of which node, at which line, why, and what would change it."""

import re

import pytest
import torch
from torch import Tensor, nn
from torchvision import models  # pyright: ignore[reportMissingTypeStubs]

import pdp_fx
from pdp_fx import NM, Channels, Explanation, PruneSpec, SpecError, StateError, Unstructured
from pdp_fx.alike import pattern
from pdp_fx.granularity import Rule, rule_text
from tests.nets import at_once, net

HALF = Channels(ratio=0.5)


def explained(model: nn.Module, rule: Rule | PruneSpec | None, *shape: int) -> Explanation:
    spec = rule if isinstance(rule, PruneSpec) else at_once(rule)
    return pdp_fx.explain(pdp_fx.prepare(model, spec, torch.randn(shape)))


class Refusing(nn.Module):
    """Two of its layers cannot lose channels; images (n, 3, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted = nn.Conv2d(3, 4, 1)
        self.added = nn.Conv2d(4, 3, 1)
        self.free = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.sorted(x).sort(dim=1).values
        y = self.added(y) + x
        return self.head(torch.relu(self.free(y)))


class Keeping(nn.Module):
    """Returns a hidden layer beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.hidden(x))
        return {"logits": self.head(hidden), "states": hidden}


class Picked(nn.Module):
    """One layer makes the channels of three groups: two parts of it go different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 12)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        first, second = x.split([8, 4], dim=1)
        return self.head(torch.relu(self.left(first)) + self.right(second.softmax(1)))


class Stack(nn.Module):
    """Many layers of one kind."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Encoder(nn.Module):
    """Two residual layers behind LayerNorms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.hidden = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, hidden, out in zip(self.norms, self.hidden, self.out, strict=True):
            x = x + out(torch.relu(hidden(norm(x))))
        return self.head(x)


def test_every_kept_channel_names_its_node_line_reason_and_remedy() -> None:
    kept = {entry.group: entry for entry in explained(Refusing(), HALF, 2, 3, 4, 4).kept}
    assert list(kept) == ["sorted", "added", "head"]
    assert (kept["sorted"].width, kept["sorted"].nodes) == (4, ("sort",))
    assert kept["sorted"].why == "sort runs over these channels"
    assert re.fullmatch(r"test_explain\.py:\d+", kept["sorted"].sources[0])
    assert kept["added"].why == "add joins these channels with values that have none"
    assert kept["added"].remedy.startswith("free what keeps those values, make constants a buffer, or")
    assert kept["head"].why == "the model returns these channels"


def test_reasons_that_differ_in_the_node_only_are_one() -> None:
    found = explained(Encoder(), HALF, 5, 3)
    (stream,) = [entry for entry in found.kept if entry.group == "stem"]
    assert stream.nodes == ("norms_0", "norms_1")
    assert len(stream.sources) == 1
    assert str(stream).startswith("  %norms_{0-1} (test_explain.py:")
    assert "to change this: Channels(through_norms=True) gives it masked statistics" in str(stream)


def test_a_norm_with_masked_statistics_shows_where_it_is_masked() -> None:
    found = explained(Encoder(), Channels(ratio=0.5, through_norms=True), 5, 3)
    (stream,) = [group for group in found.groups if group.name == "stem"]
    assert {"%norms_0 (statistics)", "%norms_1 (statistics)"} <= set(stream.masked)


def test_groups_tell_width_makers_masks_and_members() -> None:
    conv1, conv2 = explained(net("conv")[0], HALF, 2, 3, 8, 8).groups
    assert (conv1.name, conv1.width, conv1.least, conv1.rule) == ("conv1", 8, 1, "Channels(ratio=0.5)")
    assert conv1.producers == ("conv1",)
    assert conv1.masked == ("bn1",)
    assert set(conv1.members) >= {
        "conv1.weight[0]",
        "bn1.weight[0]",
        "bn1.running_mean[0]",
        "conv2.weight[1]",
    }
    assert conv2.name == "conv2"


def test_the_least_number_of_channels_is_told() -> None:
    groups = explained(net("conv")[0], Channels(ratio=0.5, min_channels=3), 2, 3, 8, 8).groups
    assert [group.least for group in groups] == [3, 3]


def test_a_group_is_named_even_if_its_name_is_a_number() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Linear(8, 2))
    lines = str(explained(model, HALF, 2, 4)).splitlines()
    assert [line.split() for line in lines[1:4:2]] == [
        ["group", "channels", "made", "by", "masked", "at"],
        ["1", "8", "1", "1"],
    ]


def test_groups_of_one_producer_have_names_of_their_own() -> None:
    found = explained(Picked(), HALF, 5, 4)
    names = [group.name for group in found.groups] + list(dict.fromkeys(entry.group for entry in found.kept))
    assert len(set(names)) == len(names)
    assert {"stem", "stem (2)"} <= set(names)


def test_names_of_groups_in_shufflenet_are_unique_and_make_masks_that_load() -> None:
    prepared = pdp_fx.prepare(models.shufflenet_v2_x0_5(), at_once(HALF), torch.randn(1, 3, 32, 32))
    names = [group.name for group in pdp_fx.explain(prepared).groups]
    assert len(set(names)) == len(names)
    assert "stage2.0.branch1.2 (2)" in names
    keys = [key for key in prepared.state_dict() if key.startswith("pdp.")]
    assert all(re.fullmatch(r"[\w.]+", key) for key in keys)
    assert "pdp.masks.stage2_0_branch1_2_2.units" in keys


def test_alike_rows_become_one_where_there_are_many() -> None:
    few, many = (str(explained(Stack(depth), HALF, 5, 6)) for depth in (4, 60))
    assert "layers.{" not in few
    assert "layers.{0-58}  6           layers.{0-58}  layers.{0-58}  59" in many
    assert len(many.splitlines()) < 12


def test_all_densenet_groups_fit_on_a_page() -> None:
    text = str(explained(models.densenet121(), HALF, 1, 3, 32, 32))
    assert "features.denseblock{1-4}.denselayer{1-24}.conv1  128" in text
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines())) < 260


def test_each_rule_has_a_table_of_its_own_with_a_short_title() -> None:
    spec = PruneSpec(Channels(mac_reduction=0.5), overrides={"fc": NM(2, 4), "conv1": Unstructured(0.8)})
    text = str(explained(net("conv")[0], spec, 2, 3, 8, 8))
    assert "Channel groups, Channels(mac_reduction=0.5)\n" in text or "conv2" in text
    assert "Weights, NM(2, 4)\n" in text
    assert "Weights, Unstructured(ratio=0.8)\n" in text


def test_layers_that_do_not_fit_say_why() -> None:
    text = str(explained(net("conv")[0], NM(2, 4), 2, 3, 8, 8))
    assert "conv1    3 input channels do not divide into groups of 4" in text


def test_the_text_is_stable_and_holds_no_address() -> None:
    texts = {str(explained(Refusing(), HALF, 2, 3, 4, 4)) for _ in range(2)}
    assert len(texts) == 1
    assert " at 0x" not in texts.pop()


def test_weights_without_example_inputs_are_explained_too() -> None:
    prepared = pdp_fx.prepare(net("mlp")[0], at_once(Unstructured(0.5)))
    assert [weight.name for weight in pdp_fx.explain(prepared).weights] == [
        "fc1.weight",
        "fc2.weight",
        "fc3.weight",
    ]


def test_a_model_that_was_never_prepared_is_refused() -> None:
    with pytest.raises(StateError, match="came from pdp_fx.prepare"):
        pdp_fx.explain(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Unstructured(0.9), "Unstructured(ratio=0.9)"),
        (NM(2, 4), "NM(2, 4)"),
        (Channels(mac_reduction=0.5), "Channels(mac_reduction=0.5)"),
        (Channels(ratio=0.5, round_to=16), "Channels(ratio=0.5, round_to=16)"),
    ],
)
def test_a_rule_is_written_without_its_defaults(rule: Rule, text: str) -> None:
    assert rule_text(rule) == text


def test_what_a_model_returns_beside_its_outputs_is_named() -> None:
    with pytest.raises(SpecError) as refused:
        explained(Keeping(), HALF, 2, 4)
    lines = str(refused.value).splitlines()
    returned = "%output: the model returns these channels in"
    assert f"  hidden: {returned} states; have the model leave states out, if nobody needs it" in lines
    assert f"  head: {returned} logits" in lines


def test_a_number_that_is_alike_in_all_names_keeps_its_zeros() -> None:
    assert pattern(["01_net.py:4"]) == "01_net.py:4"
    assert pattern(["01_net.py:4", "01_net.py:9"]) == "01_net.py:{4,9}"
