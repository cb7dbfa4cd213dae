from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdp_fx import Channels
from pdp_fx.channels.channel_map import ChannelMap
from pdp_fx.compiler import Context
from pdp_fx.passes.find_sites import FindSites, Sites
from pdp_fx.passes.label_channels import LabelChannels, LabelWatch
from pdp_fx.trace import trace
from pdp_fx.tracing.outcome import Given, outcome
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


class Output(OrderedDict[str, object]):
    """A record, as of the outputs of transformers."""


class Recorded(nn.Module):
    """Returns a record of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Output:
        hidden = self.first(x)
        return Output(hidden=[hidden.sum(1)], logits=self.second(hidden))


def test_the_run_with_labels_returns_what_the_model_returns() -> None:
    model, x = Recorded().eval(), torch.randn(2, 4)
    watch = LabelWatch(SPEC)
    trace(model, x, watch)
    assert watch.outcome is not None
    assert not outcome(model, model(x), Given(x)).difference(watch.outcome)


class Adapted(nn.Module):
    """A padded image, a batch norm, and a weight that is computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(10), nn.Linear(10, 6)
        self.down, self.up = nn.Parameter(torch.randn(2, 10)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(functional.pad(self.conv(x), (0, 0, 0, 0, 1, 1))).relu().mean((2, 3))
        return functional.linear(x, self.head.weight + self.up @ self.down)


def test_labels_and_trials_do_not_depend_on_the_default_device() -> None:
    x = torch.randn(2, 3, 4, 4)
    gm = trace(Adapted(), x)
    with torch.device("meta"):
        ctx = Context(SPEC, ((x,), {}))
        FindSites().run(gm, ctx)
        LabelChannels().run(gm, ctx)
    assert [(group.name, group.width) for group in ctx.get(ChannelMap).groups] == [("conv", 8)]
    assert [weight.parameter for weight in ctx.get(Sites).weights if not weight.unfit] == [
        "conv.weight",
        "head.weight",
    ]


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
