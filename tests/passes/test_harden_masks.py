import pytest
import torch
from torch import nn

import pdp_fx
from pdp_fx import NM, Channels, Unstructured
from pdp_fx.channels.labels import Slot
from pdp_fx.granularity import Rule
from pdp_fx.passes.harden_masks import Dropped, swap_tensors
from tests.nets import NETS, RULES, at_once, convert_until, counts, difference, listing, net, pruned

HARDENED = """\
x = input
conv_weight = conv.weight
conv = conv(x, weight=conv_weight)
bn = bn(conv)
relu = relu(bn)
head_weight = head.weight
head = head(relu, weight=head_weight)"""


def test_masked_values_become_the_parameters() -> None:
    model, x = net("small")
    prepared = pruned(model, Unstructured(0.5), x).eval()
    gm, _ = convert_until(prepared, "harden-masks")
    assert listing(gm) == HARDENED
    for name in ("conv", "head"):
        dense, hard = (module.get_parameter(f"{name}.weight") for module in (prepared, gm))
        assert torch.equal(hard, torch.where(hard == 0, 0, dense))
        assert int((hard == 0).sum()) == counts(prepared)[f"{name}_weight"]
    assert not hasattr(gm, "pdp")


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_outputs_are_those_of_the_prepared_model_bit_for_bit(name: str, rule: Rule) -> None:
    model, x = net(name)
    prepared = pruned(model, rule, x).eval()
    gm, _ = convert_until(prepared, "harden-masks")
    assert difference(prepared, gm, x) == 0
    assert "pdp" not in listing(gm)
    assert "mask_axis" not in listing(gm)


class Steered(nn.Module):
    """A module that decides by its data, so that it is kept whole, and has a mask of its own."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x * 2 if float(x.sum()) > 1e9 else x
        return x if mask is None else x * mask


class GivesMasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.steered = Steered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steered(self.down(self.norm(self.up(x))), mask=(x > -100).double())


def test_a_mask_that_the_user_gives_to_a_module_stays() -> None:
    # For the example the mask is 1 everywhere, so that no comparison of outputs would miss it.
    x = torch.randn(2, 4, dtype=torch.float64)
    model = GivesMasks().double()
    for rule in RULES.values():
        converted = pdp_fx.convert(pruned(model, at_once(rule), x))
        assert converted(x).abs().sum() > 0
        assert converted(x - 1000).abs().sum() == 0


def test_the_channels_that_go_are_left_as_rows_of_their_producers() -> None:
    model, x = net("residual")
    prepared = pruned(model, Channels(ratio=0.5), x).eval()
    _, ctx = convert_until(prepared, "harden-masks")
    rows = ctx.get(Dropped).rows
    assert {slot: len(gone) for slot, gone in rows.items()} == {
        Slot("stem.0.weight", 0): counts(prepared)["stem_0"],
        Slot("project.0.weight", 0): counts(prepared)["stem_0"],
        Slot("expand.0.weight", 0): counts(prepared)["expand_0"],
    }
    assert rows[Slot("stem.0.weight", 0)] == rows[Slot("project.0.weight", 0)]


def test_weights_leave_no_channels_to_remove() -> None:
    model, x = net("small")
    for rule in (Unstructured(0.5), NM(2, 4)):
        _, ctx = convert_until(pruned(model, rule, x), "harden-masks")
        assert ctx.get(Dropped).rows == {}


def test_a_frozen_weight_stays_frozen() -> None:
    model, x = net("small")
    model.get_parameter("conv.weight").requires_grad_(False)
    gm, _ = convert_until(pruned(model, at_once(Unstructured(0.5)), x), "harden-masks")
    assert [name for name, p in gm.named_parameters() if not p.requires_grad] == ["conv.weight"]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_stays(memory_format: torch.memory_format) -> None:
    model, x = net("small")
    model.to(memory_format=memory_format)
    for rule in (Unstructured(0.5), NM(2, 4)):
        gm, _ = convert_until(pruned(model, rule, x), "harden-masks")
        for name, parameter in gm.named_parameters():
            assert parameter.stride() == model.get_parameter(name).stride(), name


def test_shared_tensors_are_swapped_everywhere() -> None:
    old, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    root = nn.ModuleList([nn.Module(), nn.Module()])
    for child in root:
        child.register_parameter("p", old)
    root[0].register_buffer("b", torch.zeros(1))
    swap_tensors(root, {old: new})
    assert root[0].get_parameter("p") is root[1].get_parameter("p") is new
    assert torch.equal(root[0].get_buffer("b"), torch.zeros(1))
