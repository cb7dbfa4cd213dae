import torch
from torch import Tensor, nn
from torch.nn import functional

from pdp_fx import NM, Channels, Unstructured
from pdp_fx.ops.explicit import ExplicitBatchNorm2d, ExplicitConv2d
from pdp_fx.passes.expose_parameters import Exposed, swap_modules
from tests.nets import at_once, listing, net, prepare_until

WEIGHTS = """\
x = input
conv_weight = conv.weight
conv = conv(x, weight=conv_weight)
bn = bn(conv)
relu = relu(bn)
head_weight = head.weight
head = head(relu, weight=head_weight)"""

CHANNELS = """\
x = input
conv = conv(x)
bn_weight = bn.weight
bn_bias = bn.bias
bn = bn(conv, weight=bn_weight, bias=bn_bias)
relu = relu(bn)
head = head(relu)"""


def test_weights_that_will_be_masked_become_values() -> None:
    model, x = net("small")
    gm, ctx = prepare_until(model, at_once(Unstructured(0.5)), x, "expose-parameters")
    assert listing(gm) == WEIGHTS
    assert type(gm.get_submodule("conv")) is ExplicitConv2d
    assert list(ctx.get(Exposed).nodes) == ["conv.weight", "head.weight"]


def test_for_channels_the_parameters_behind_which_they_vanish_become_values() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(Channels(ratio=0.5)), x, "expose-parameters")
    assert listing(gm) == CHANNELS
    assert type(gm.get_submodule("bn")) is ExplicitBatchNorm2d
    assert type(gm.get_submodule("conv")) is nn.Conv2d


def test_the_graph_computes_what_the_model_computes() -> None:
    for rule in (Unstructured(0.5), Channels(ratio=0.5), NM(2, 4)):
        for name in ("small", "residual", "tied", "mlp"):
            model, x = net(name)
            gm, _ = prepare_until(model, at_once(rule), x, "expose-parameters")
            assert torch.equal(gm.eval()(x), model.eval()(x))


def test_what_is_not_masked_is_left_as_it_is() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, at_once(None, {"head": Unstructured(0.5)}), x, "expose-parameters")
    assert [line for line in listing(gm).splitlines() if "weight" in line] == [
        "head_weight = head.weight",
        "head = head(relu, weight=head_weight)",
    ]


class Mixed(nn.Module):
    """One weight used by a layer, by a function, and by a second call of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(functional.linear(self.fc(x), self.fc.weight))


def test_one_read_serves_all_uses() -> None:
    model, x = Mixed(), torch.randn(3, 6)
    gm, _ = prepare_until(model, at_once(Unstructured(0.5)), x, "expose-parameters")
    reads = [line for line in listing(gm).splitlines() if line.endswith("= fc.weight")]
    assert len(reads) == 1
    assert sum(reads[0].partition(" ")[0] in line for line in listing(gm).splitlines()) == 4
    assert torch.equal(gm(x), model(x))


def test_a_module_is_swapped_under_all_its_names() -> None:
    root, new = nn.Module(), nn.ReLU()
    old = nn.Identity()
    root.add_module("a", old)
    root.add_module("b", nn.Sequential(old))
    swap_modules(root, {old: new})
    assert root.get_submodule("a") is root.get_submodule("b.0") is new
