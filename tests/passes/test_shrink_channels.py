import pytest
import torch
from torch import nn

from pdp_fx import Channels, Unstructured
from pdp_fx.channels.labels import Slot
from pdp_fx.errors import PassError
from pdp_fx.passes.harden_masks import Dropped
from pdp_fx.passes.shrink_channels import ShrinkChannels
from tests.nets import NETS, at_once, convert_until, difference, listing, net, pruned

SHRUNK = f"""\
GraphModule(
  (conv): Conv2d(3, 2, kernel_size=(3, 3), stride=(1, 1), bias=False)
  (bn): {nn.BatchNorm2d(2)}
  (head): Conv2d(2, 2, kernel_size=(1, 1), stride=(1, 1))
)"""


def test_tensors_and_the_sizes_of_modules_shrink_together() -> None:
    model, x = net("small")
    gm, _ = convert_until(pruned(model, Channels(ratio=0.5), x), "shrink-channels")
    assert str(gm).split("\n\n")[0] == SHRUNK
    shapes = {name: tuple(tensor.shape) for name, tensor in gm.state_dict().items() if tensor.ndim}
    assert shapes == {
        "conv.weight": (2, 3, 3, 3),
        "bn.weight": (2,),
        "bn.bias": (2,),
        "bn.running_mean": (2,),
        "bn.running_var": (2,),
        "head.weight": (2, 2, 1, 1),
        "head.bias": (2,),
    }


@pytest.mark.parametrize("name", NETS)
def test_what_is_left_is_cut_from_the_hardened_tensors(name: str) -> None:
    model, x = net(name)
    prepared = pruned(model.double(), Channels(ratio=0.5), x.double()).eval()
    hard, _ = convert_until(prepared, "restore-modules")
    small, _ = convert_until(prepared, "shrink-channels")
    assert difference(prepared, small, x.double()) <= 1e-12
    assert listing(small) == listing(hard)
    for key, tensor in small.state_dict().items():
        kept = set(tensor.flatten().tolist())
        assert kept <= set(hard.state_dict()[key].flatten().tolist())
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in hard.parameters())


def test_weights_keep_the_order_of_their_axes_in_memory() -> None:
    model, x = net("small")
    gm, _ = convert_until(
        pruned(model.to(memory_format=torch.channels_last), Channels(ratio=0.5), x), "shrink-channels"
    )
    weight = gm.get_parameter("conv.weight")
    assert weight.shape == (2, 3, 3, 3)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


def test_depthwise_groups_follow() -> None:
    model, x = net("residual")
    gm, _ = convert_until(
        pruned(model, at_once(Channels(ratio=0.5), allocation="uniform"), x), "shrink-channels"
    )
    conv = gm.get_submodule("depthwise.0")
    assert isinstance(conv, nn.Conv2d)
    assert (conv.in_channels, conv.out_channels, conv.groups) == (8, 8, 8)


def test_nothing_to_remove_edits_nothing() -> None:
    model, x = net("small")
    gm, ctx = convert_until(pruned(model, Unstructured(0.5), x), "restore-modules")
    assert not ShrinkChannels().run(gm, ctx)


def test_channels_that_must_stay_are_refused() -> None:
    model, x = net("small")
    gm, ctx = convert_until(pruned(model, Channels(ratio=0.5), x), "restore-modules")
    ctx.put(Dropped({Slot("head.weight", 0): (0,)}))
    with pytest.raises(PassError, match=r"channels of head were to be removed, but must stay: %output"):
        ShrinkChannels().run(gm, ctx)


def test_example_inputs_are_needed() -> None:
    model, x = net("small")
    gm, ctx = convert_until(pruned(model, Channels(ratio=0.5), x), "restore-modules")
    ctx.example_inputs = None
    with pytest.raises(PassError, match="only be removed with the example inputs"):
        ShrinkChannels().run(gm, ctx)


def test_frozen_parameters_stay_frozen() -> None:
    model, x = net("small")
    model.get_parameter("conv.weight").requires_grad_(False)
    gm, _ = convert_until(pruned(model, Channels(ratio=0.5), x), "shrink-channels")
    assert [name for name, p in gm.named_parameters() if not p.requires_grad] == ["conv.weight"]
