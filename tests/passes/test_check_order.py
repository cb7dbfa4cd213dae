import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import Channels, VerifyError
from pdp_fx.passes.check_order import CheckOrder
from tests.nets import at_once, convert_until, difference, pruned, shake


def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(5)
    return shake(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))), torch.randn(2, 3, 5, 5)


def flip_after_relu(gm: torch.fx.GraphModule) -> None:
    """Turn the order of the channels between the two layers around."""
    (relu,) = (node for node in gm.graph.nodes if node.target == "1")
    with gm.graph.inserting_after(relu):
        flipped = gm.graph.call_function(torch.flip, (relu, [1]))
    relu.replace_all_uses_with(flipped, delete_user_cb=lambda user: user is not flipped)
    gm.recompile()


def test_channels_in_another_order_are_found_by_their_labels() -> None:
    model, x = chain()
    gm, ctx = convert_until(pruned(model, at_once(Channels(0.5)), x), "shrink-channels")
    assert not CheckOrder().run(gm, ctx)
    flip_after_relu(gm)
    with pytest.raises(VerifyError, match="brought together 4 pairs of channels that did not meet before"):
        CheckOrder().run(gm, ctx)


def test_a_graph_that_was_edited_after_prepare_is_analysed_anew() -> None:
    model, x = chain()
    prepared = pruned(model, at_once(Channels(0.5)), x)
    flip_after_relu(prepared)
    small = pdp_fx.convert(prepared)
    assert small.get_parameter("2.weight").shape == (4, 4, 1, 1)
    assert difference(small, prepared.eval(), x) < 1e-6


class MultiQuery(nn.Module):
    """Four heads of four that share a key and a value, all from one layer, as in StarCoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16 + 4 + 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unsqueeze(1).split((16, 4, 4), dim=3)
        query = query.view(*x.shape[:2], 4, -1).transpose(1, 2)
        found = functional.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="channels meet as before in its attention")
def test_heads_with_one_channel_for_queries_and_several_for_values_are_judged_in_float64() -> None:
    torch.manual_seed(1)
    model, x = MultiQuery(), torch.randn(2, 5, 8)
    prepared = pruned(model, at_once(Channels(0.6)), x)
    with pytest.raises(VerifyError, match="brought together"):
        CheckOrder().run(*convert_until(prepared, "shrink-channels"))
    small = pdp_fx.convert(prepared)
    assert small.get_parameter("out.weight").shape == (8, 4 * 2)
    assert small.get_parameter("qkv.weight").shape == (4 + 1 + 2, 8)
    assert difference(small, prepared.eval(), x) < 1e-6
