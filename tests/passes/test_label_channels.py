import torch
from torch import Tensor, nn

from pdp_fx import Channels
from pdp_fx.channels.channel_map import ChannelMap
from tests.nets import assert_unchanged, at_once, listing, net, prepare_until, snapshot

SPEC = at_once(Channels(ratio=0.5))


def test_groups_and_frozen_channels_are_left_for_later_passes() -> None:
    model, x = net("small")
    _, ctx = prepare_until(model, SPEC, x, "label-channels")
    found = ctx.get(ChannelMap)
    assert [(group.name, group.width) for group in found.groups] == [("conv", 4)]
    assert [(group.name, group.width) for group in found.frozen] == [("head", 2)]


def test_nothing_is_run_and_nothing_left_without_example_inputs() -> None:
    _, ctx = prepare_until(net("small")[0], SPEC, None, "label-channels")
    assert ctx.find(ChannelMap) is None


def test_the_graph_and_the_model_are_left_alone() -> None:
    model, x = net("small")
    before, generator = snapshot(model), torch.get_rng_state()
    gm, _ = prepare_until(model, SPEC, x, "label-channels")
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(listing(gm).splitlines()) == 5


class Overwrites(nn.Module):
    """Writes to its input, which is an example input here."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x.add_(1)).relu_())


def test_the_example_inputs_are_left_alone() -> None:
    x = torch.zeros(2, 8)
    _, ctx = prepare_until(Overwrites(), SPEC, x, "label-channels")
    assert ctx.example_inputs is not None
    assert torch.equal(ctx.example_inputs[0][0], torch.zeros(2, 8))
    assert torch.equal(x, torch.zeros(2, 8))
