import torch
from torch import Tensor, nn

from pdp_fx import NM, Channels, Unstructured
from pdp_fx.masks import NMMask, WeightMask
from pdp_fx.softness import Softness
from tests.nets import at_once, listing, mask_of, net, prepare_until, state

UNSTRUCTURED = """\
x = input
conv_weight = conv.weight
conv_weight_masked = pdp.masks.conv_weight(conv_weight)
conv = conv(x, weight=conv_weight_masked)
bn = bn(conv)
relu = relu(bn)
head_weight = head.weight
head_weight_masked = pdp.masks.head_weight(head_weight)
head = head(relu, weight=head_weight_masked)"""


def test_a_mask_stands_between_each_weight_and_its_use() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(Unstructured(0.5)), x, "mask-weights")
    assert listing(gm) == UNSTRUCTURED


def test_masks_have_the_kind_and_the_options_of_their_rule() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(Unstructured(0.5), {"head": NM(1, 4)}, tau=0.5), x, "mask-weights")
    first, second = mask_of(gm, "conv_weight"), mask_of(gm, "head_weight")
    assert isinstance(first, WeightMask)
    assert isinstance(second, NMMask)
    assert (first.tau, second.keep, second.of) == (Softness(0.5), 1, 4)
    assert first.parameters_read == ("conv.weight",)
    assert state(gm).rules == {"conv_weight": Unstructured(0.5), "head_weight": NM(1, 4)}


def test_a_tied_weight_has_one_mask_for_all_its_uses() -> None:
    model, x = net("tied")
    gm, _ = prepare_until(model, at_once(Unstructured(0.5)), x, "mask-weights")
    uses = [line for line in listing(gm).splitlines() if "weight=encoder_weight_masked" in line]
    assert uses == [
        "encoder = encoder(relu, weight=encoder_weight_masked)",
        "decoder = decoder(relu_1, weight=encoder_weight_masked)",
    ]


def test_masks_that_prune_nothing_change_nothing() -> None:
    for rule in (Unstructured(0.5), NM(2, 4)):
        model, x = net("small")
        gm, _ = prepare_until(model, at_once(rule), x, "mask-weights")
        assert torch.equal(gm.eval()(x), model.eval()(x))


def test_without_weights_to_mask_nothing_is_edited() -> None:
    model, x = net("small")
    exposed, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "expose-parameters")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "mask-weights")
    assert listing(gm) == listing(exposed)


class Clash(nn.Module):
    """Two layers whose names differ in a dot only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4))
        self.a_0 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a_0(self.a(x))


def test_names_that_would_clash_are_told_apart() -> None:
    gm, _ = prepare_until(Clash(), at_once(Unstructured(0.5)), torch.randn(2, 4), "mask-weights")
    assert [name for name, _ in state(gm).mask_items()] == ["a_0_weight", "a_0_weight_"]
