from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import NM, Channels, SpecError, Unstructured
from pdp_fx.granularity import Rule
from pdp_fx.passes.find_sites import Site, Sites
from tests.nets import at_once, listing, net, prepare_until

SPEC = at_once(Unstructured(0.5))


def sites(model: nn.Module, x: Tensor) -> Sites:
    _, ctx = prepare_until(model, SPEC, x, "find-sites")
    return ctx.get(Sites)


def test_weights_of_convs_and_linears_in_graph_order() -> None:
    model, x = net("small")
    found = sites(model, x)
    assert found.weights == (
        Site("conv.weight", "conv", ("conv",)),
        Site("head.weight", "head", ("head",)),
    )
    assert found.out_of_reach == {}


def test_the_graph_is_left_alone() -> None:
    model, x = net("small")
    gm, _ = prepare_until(model, SPEC, x, "find-sites")
    assert listing(gm).splitlines() == [
        "x = input",
        "conv = conv(x)",
        "bn = bn(conv)",
        "relu = relu(bn)",
        "head = head(relu)",
    ]


def test_a_tied_weight_is_one_site_with_two_users() -> None:
    model, x = net("tied")
    assert [(site.parameter, site.nodes) for site in sites(model, x).weights] == [
        ("stem.weight", ("stem",)),
        ("encoder.weight", ("encoder", "decoder")),
        ("head.weight", ("head",)),
    ]


class Free(nn.Module):
    """Weights used by functions, a layer that keeps its own to itself, a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.matrix = nn.Parameter(torch.randn(4, 6))
        self.form = nn.Bilinear(4, 4, 5)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.kernel).flatten(2).transpose(1, 2)
        x = functional.linear(x, self.matrix)
        return self.computed(self.form(x, x))


def test_weights_used_by_functions_are_sites_and_those_out_of_reach_are_not() -> None:
    found = sites(Free(), torch.randn(2, 3, 5, 5))
    assert [site.parameter for site in found.weights] == [
        "kernel",
        "matrix",
        "computed.parametrizations.weight.original1",
    ]
    assert found.out_of_reach["form.weight"] == "which form uses inside itself"


def test_a_weight_that_a_hook_computes_is_a_site_by_its_parameter() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    assert [site.parameter for site in sites(model, torch.randn(2, 8)).weights] == [
        "0.weight_orig",
        "1.weight",
    ]


def test_a_model_without_weights_is_refused() -> None:
    why = r"no conv or linear weight that .*\n  its parameters have one axis at most: 0.weight, 0.bias"
    with pytest.raises(SpecError, match=why):
        sites(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), torch.randn(3, 4))


def test_a_model_whose_weights_are_out_of_reach_is_refused_with_the_reason() -> None:
    class Own(nn.Linear):
        """Another class than torch's, which decides by its data."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    why = r"can be pruned\n  no mask can be put on 0.weight, which 0 uses inside itself"
    with pytest.raises(SpecError, match=why):
        sites(nn.Sequential(Own(4, 4)), torch.randn(3, 4))


class Hands(nn.Linear):
    """Gives what is computed of its weight to a function that decides by its data."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return decides(input, self.weight * 2)


def decides(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight) if x.sum() > 0 else x


def test_weights_that_are_given_to_unknown_code_are_named() -> None:
    why = "no mask can be put on {}, which no conv, linear or matmul is seen to use, nor what is computed of "
    prepared = pdp_fx.prepare(nn.Sequential(nn.Linear(4, 4), Hands(4, 4)), SPEC, torch.randn(3, 4))
    ((layer, said),) = pdp_fx.explain(prepared).skipped
    assert (layer, said) == ("1", why.format("its weight") + "parameters alone")
    with pytest.raises(SpecError, match=why.format("0.weight")):
        pdp_fx.prepare(nn.Sequential(Hands(4, 4)), SPEC, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_what_a_computed_weight_is_made_of_is_not_given_to_unknown_code(rule: Rule) -> None:
    normed = (torch.nn.utils.weight_norm(nn.Conv2d(width, 8, 3, padding=1)) for width in (8, 8))
    model = nn.Sequential(nn.Conv2d(2, 8, 3), *normed, nn.Conv2d(8, 3, 1))
    prepared = pdp_fx.prepare(model, at_once(rule), torch.randn(2, 2, 8, 8))
    assert not pdp_fx.explain(prepared).skipped


class Products(nn.Module):
    """Weights on either side of products of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8, 5))
        self.experts = nn.Parameter(torch.randn(3, 5, 4))
        self.last = nn.Parameter(torch.randn(3, 4, 4))
        self.rows, self.columns = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(7, 2))
        self.unsaid = nn.Parameter(torch.randn(2, 2))
        self.scales, self.scale = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.left @ x.mT).mT @ self.right
        x = torch.bmm(x.expand(3, -1, -1), self.experts)
        x = torch.bmm(x, self.last.mT).mean(0)
        x = torch.einsum("bi, oi -> bo", x, self.rows)
        x = torch.einsum("bi,io->bo", [x, self.columns])
        x = torch.einsum("...i,oi", x, self.unsaid)
        return torch.einsum(",i,bi->bi", self.scale, self.scales, x)


class OfAVector(nn.Module):
    """A vector of scores, which N:M has no groups in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scores = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * (x @ self.scores).tanh()[..., None]


def test_a_vector_is_pruned_by_single_weights_only() -> None:
    found = {site.parameter: site for site in sites(OfAVector(), torch.randn(4, 8)).weights}
    assert found["scores"].unfit == ""
    assert found["scores"].unfit_for_groups.startswith("it is a vector")
    model = pdp_fx.prepare(OfAVector(), at_once(NM(2, 4)), torch.randn(4, 8))
    pdp_fx.step(model)
    converted = pdp_fx.convert(model)
    assert (converted.get_parameter("scores") != 0).all()
    assert (converted.get_parameter("layer.weight") == 0).sum() == 32


def test_weights_of_products_know_where_their_input_channels_lie() -> None:
    found = sites(Products(), torch.randn(4, 6)).weights
    assert not any(site.unfit for site in found)
    assert [(site.parameter, None if site.unfit_for_groups else site.axis) for site in found] == [
        ("left", 1),
        ("right", 0),
        ("experts", 1),
        ("last", 2),
        ("rows", 1),
        ("columns", 0),
        ("unsaid", None),
    ]


class Spectral(nn.Module):
    """A layer of complex numbers before one of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Linear(8, 8, dtype=torch.complex64)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 8) to (n, 4)."""
        return self.head(self.waves(x.to(torch.complex64)).abs())


def test_complex_weights_stay_with_a_reason() -> None:
    model, x = Spectral(), torch.randn(2, 8)
    waves, head = sites(model, x).weights
    assert "torch.complex64, and only real ones" in waves.unfit
    assert not head.unfit
    prepared = pdp_fx.prepare(model, SPEC, x)
    assert "torch.complex64" in str(pdp_fx.explain(prepared))
    pdp_fx.step(prepared)
    prepared(x).sum().backward()
    small = pdp_fx.convert(prepared)
    assert small(x).equal(prepared.eval()(x))
    assert int((small.get_parameter("head.weight") == 0).sum()) == 16


class ReadsInside(nn.Module):
    """Decides by its data; calls one layer, whose dtype it asks for, and takes the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.called(x.to(self.called.weight.dtype))
        return functional.linear(x, self.read.weight) if x.sum() > -1e9 else x


def test_a_weight_that_is_read_without_calling_its_layer_stays_where_no_mask_reaches_it() -> None:
    found = sites(nn.Sequential(ReadsInside(), nn.Linear(8, 2)), torch.randn(2, 8))
    unfit = {site.parameter: site.unfit for site in found.weights}
    assert not unfit["0.called.weight"]
    assert "reads it without calling its layer" in unfit["0.read.weight"]


class ReadsElsewhere(ReadsInside):
    """Takes weights in branches that the example does not take, and names others for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.left = nn.Linear(8, 8), nn.Linear(8, 8)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.called.weight)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.read.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(self.listed(self.called(x).to(self.called.weight.dtype)))
        return self.read(x) if x.sum() > -1e9 else self.other(x)


class ReadsOfAny(ReadsElsewhere):
    """Takes the weight of a layer that its code does not tell."""

    def other(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.children()
        for layer in layers:
            x = functional.linear(x, layer.weight)
        return x


@pytest.mark.parametrize(
    ("kind", "read"), [(ReadsElsewhere, {"read"}), (ReadsOfAny, {"called", "read", "listed", "left"})]
)
def test_a_weight_that_is_read_in_another_branch_than_the_examples_stays(
    kind: type[nn.Module], read: set[str]
) -> None:
    found = sites(nn.Sequential(kind(), nn.Linear(8, 2)), torch.randn(2, 8)).weights
    unfit = {site.parameter.split(".")[1] for site in found if "without calling its layer" in site.unfit}
    assert unfit == read


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
@pytest.mark.parametrize(("hooked", "read"), [(0, 0), (2, 2), (0, 2), (2, 0)])
def test_a_weight_that_a_hook_of_a_layer_reads_is_not_masked(rule: Rule, hooked: int, read: int) -> None:
    wide = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*(layer for pair in wide for layer in pair), nn.Linear(8, 3)).double()
    weight: Any = model[read].weight
    model[hooked].register_forward_hook(lambda _, inputs, result: result + weight.sum(1))
    x = torch.randn(2, 8).double()
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    pdp_fx.step(prepared)
    small = pdp_fx.convert(prepared)
    torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-12)
    kept = small.get_parameter(f"{read}.weight")
    assert kept.count_nonzero() == kept.numel()
    if isinstance(rule, Unstructured):
        assert "or a hook, reads it without calling its layer" in str(pdp_fx.explain(prepared))


class LendsWeights(nn.Module):
    """Calls a net with other weights than its own, several at once, as ensembles do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.weights = nn.Parameter(torch.randn(3, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def one(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.net, {"weight": weight}, (row,))

        return torch.vmap(one, in_dims=(-2, 0), out_dims=-2)(x, self.weights)


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_a_layer_that_is_called_with_another_weight_is_not_masked(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), LendsWeights()).double()
    x = torch.randn(2, 3, 4).double()
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    pdp_fx.step(prepared)
    small = pdp_fx.convert(prepared)
    torch.testing.assert_close(small(x), prepared.eval()(x), rtol=0, atol=1e-12)
    assert small.get_parameter("3.net.weight").count_nonzero() == 8
    if isinstance(rule, Unstructured):
        assert "or calls it with another tensor" in str(pdp_fx.explain(prepared))
