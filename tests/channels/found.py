"""Random nets that once failed, as short as they get, each under the name of what was wrong."""

from dataclasses import dataclass

from pdp_fx.spec import Allocation, Channels
from tests.channels.random_nets import Step


@dataclass(frozen=True)
class Found:
    """A net, and how it was pruned."""

    name: str
    steps: tuple[Step, ...]
    rule: Channels = Channels(ratio=0.7)
    allocation: Allocation = "uniform"


FOUND = (
    Found(
        "a choice between two tensors masks only one of them",
        (Step("conv", (0,)), Step("norm", (1,), 2), Step("where", (2, 1))),
    ),
    Found(
        "channels that nobody reads have no place for a mask",
        (
            Step("conv", (0,)),
            Step("pad_pixels", (1,), 2),
            Step("slice_half", (2,)),
            Step("sum_channels", (3,)),
        ),
        Channels(ratio=0.2),
    ),
    Found(
        "all channels of a pixel shuffle are one",
        (Step("conv", (0,)), Step("pixel_shuffle", (1,))),
        Channels(ratio=0.2),
    ),
    Found(
        "a slice of channels is left with fewer than it takes",
        (Step("conv", (0,)), Step("sum_all", (1,)), Step("slice", (2,), 2)),
        allocation="global",
    ),
    Found(
        "a part of a split becomes empty",
        (Step("conv", (0,)), Step("swapped", (1,))),
    ),
    Found(
        "both halves of half of the channels",
        (Step("conv_bn_relu", (0,)), Step("slice_half", (1,)), Step("conv", (2,)), Step("halves", (2,))),
        Channels(ratio=0.5),
    ),
    Found(
        "picked channels of a grouped convolution",
        (Step("conv", (0,)), Step("grouped_2", (1,), 3), Step("picked", (2,))),
        allocation="global",
    ),
    Found(
        "none of the picked channels is left",
        (Step("conv", (0,)), Step("conv_1x1", (1,), 2), Step("picked", (2,)), Step("norm", (3,), 2)),
        allocation="global",
    ),
    Found(
        "every other channel of a grouped transposed convolution",
        (Step("conv_bn_relu", (0,), 3), Step("up_grouped", (1,), 2), Step("every_other", (2,))),
    ),
    Found(
        "none of the picked channels is left for a sum over everything",
        (Step("conv_bn_relu", (0,), 1), Step("picked", (1,)), Step("conv", (2,)), Step("sum_all", (3,)))
        + (Step("multiply", (4, 3)),),
        allocation="global",
    ),
    Found(
        "none of the picked channels is left for a layer with a scale",
        (
            Step("conv_bn_relu", (0,), 1),
            Step("picked", (1,)),
            Step("conv_1x1", (2,), 3),
            Step("scaled", (3,)),
        ),
        Channels(ratio=0.7, through_norms=True),
        "global",
    ),
    Found(
        "copies of the input in a layer that is used again",
        (
            Step("conv_bn_relu", (0,)),
            Step("pixel_unshuffle", (1,)),
            Step("conv", (2,)),
            Step("shuffle_2", (3,)),
        )
        + (Step("slice", (0,)), Step("interleave", (5,), 1))
        + tuple(Step("conv", (place,)) for place in range(6, 12))
        + (Step("again", (12,), 7),),
        Channels(ratio=0.5),
        "uniform",
    ),
    Found(
        "a whole turn is none any more",
        (Step("conv_bn_relu", (0,)), Step("roll", (1,), 3)),
        Channels(ratio=0.2),
        "uniform",
    ),
    Found(
        "a computed weight that loses nothing is not written down",
        (Step("conv_bn_relu", (0,)), Step("pixel_unshuffle", (0,)), Step("standardised", (2,)))
        + (Step("relu", (3,)), Step("softmax_channels", (4,))),
        Channels(ratio=0.2),
        "uniform",
    ),
    Found(
        "of a single channel there is no variance",
        (Step("conv_bn_relu", (0,)), Step("var_channels", (1,))),
    ),
    Found(
        "of a single channel there is no variance in training",
        (Step("conv_bn_relu", (0,)), Step("conv_1x1", (1,)), Step("var_channels", (2,))),
        Channels(ratio=0.5),
        "global",
    ),
    Found(
        "a variance of half of the channels is left with one",
        (Step("conv", (0,)), Step("slice_half", (1,)), Step("softplus", (2,), 2), Step("var_channels", (3,))),
        Channels(ratio=0.7, through_norms=True),
    ),
    Found(
        "a variance of half of the channels is left with one behind another reader",
        (
            Step("conv_bn_relu", (0,), 1),
            Step("conv", (1,)),
            Step("slice_half", (2,)),
            Step("softplus", (3,), 2),
            Step("var_channels", (4,)),
            Step("softplus", (5,), 2),
            Step("conv_1x1", (6,), 1),
            Step("conv_1x1", (7,), 1),
            Step("add", (8, 1)),
        ),
        Channels(ratio=0.7, through_norms=True),
    ),
)
