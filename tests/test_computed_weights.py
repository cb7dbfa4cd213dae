"""Weights that are computed from parameters: pruned in these where that is exact, else as computed."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.prune import l1_unstructured

import pdp_fx
from pdp_fx import (
    NM,
    ChannelPolicy,
    Channels,
    MaskSite,
    Progress,
    PruneSpec,
    Schedule,
    SpecError,
    Unstructured,
    WeightPolicy,
)
from pdp_fx.planning import parameters_of
from pdp_fx.spec import Rule
from tests.channels import nets_weights
from tests.channels.checks import check_converted, pruner_of, train
from tests.channels.construct import Construct

AT_ONCE = Schedule(0, 1.0)
PRUNED = {
    "LowRankAdapter": {"hidden.weight", "head.weight"},
    "SumOfKernels": {"stem.0.weight", "wide.weight", "head.weight"},
    "MaskedKernel": {"stem.0.weight", "conv.weight", "head.weight"},
    "TiedAutoencoder": {"encoder.weight"},
    "CatOfWeights": {"q.weight", "k.weight", "v.weight", "head.weight"},
    "HalfOfWeight": {"hidden.weight", "head.weight"},
    "ScaledWeight": {"stem.0.weight", "conv.weight", "head.weight"},
    "MixedKernels": {"stem.0.weight", "head.weight"},
    "SpectralNorm": {"stem.0.weight", "conv.parametrizations.weight.original", "head.weight"},
    "StandardisedWeight": {"stem.0.weight", "conv.weight", "head.weight"},
    "OrthogonalWeight": {"hidden.parametrizations.weight.original", "head.weight"},
    "NormFreeBlock": {f"{name}.weight" for name in ("stem", "narrow", "grouped", "deep", "widen", "head")},
    "StandardisedBeforeGroups": {"stem.weight", "conv.weight", "head.weight"},
}
SKIPPED = {
    "LowRankAdapter": {"up", "down"},
    "SumOfKernels": {"point"},
    "MixedKernels": {"experts"},
}
ROWS = [row for row in nets_weights.WEIGHTS if row.name in PRUNED]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_single_weights_are_pruned_in_their_parameters_or_listed(row: Construct) -> None:
    torch.manual_seed(0)
    model = row.net().double()
    spec = PruneSpec(Unstructured(0.5), schedule=AT_ONCE, allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, row.inputs(2))
    skipped = dict(pdp_fx.explain(prepared).skipped)
    assert {weight.name for weight in pdp_fx.explain(prepared).weights} == PRUNED[row.name]
    assert set(skipped) == SKIPPED.get(row.name, set())
    assert all("nets_weights.py" in why or "pruned instead" in why for why in skipped.values()), skipped
    train(prepared, [row.inputs(2)])
    pdp_fx.step(prepared)
    left = dict(check_converted(model, prepared.eval(), [row.inputs(3)]).named_parameters())
    for name in PRUNED[row.name]:
        assert int((left[name] == 0).sum()) == round(0.5 * left[name].numel())
    assert pruner_of(prepared).skipped == tuple(skipped.items())


class Turned(nn.Module):
    """One matrix has its inputs in its rows, one is joined below another, one loses columns."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.top, self.low = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(4, 20))

    def forward(self, x: Tensor) -> Tensor:
        joined = functional.linear(x @ self.right, torch.cat([self.top, 2 * self.low]))
        return functional.linear(joined, self.wide[:, 2:18])


def test_groups_of_weights_run_along_the_input_channels_whatever_axis_that_is() -> None:
    prepared = pdp_fx.prepare(Turned(), PruneSpec(NM(2, 4), schedule=AT_ONCE), torch.randn(3, 8))
    found = pdp_fx.explain(prepared)
    assert [weight.name for weight in found.weights] == ["right", "low", "top"]
    assert [name for name, _ in found.skipped] == ["wide"]
    assert all("no axis of it runs along the input channels" in why for _, why in found.skipped)


class CrossAttention(nn.Module):
    """The rows of one matrix serve queries, keys and values, divided by the size of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.table = nn.Parameter(torch.randn(9, 8))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        places = x @ self.table[: x.shape[1]].mT  # a table that is cut is no weight
        return self.attention(x, memory, memory)[0] + places.mean(2, keepdim=True)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
def test_weights_that_sizes_of_the_data_divide_are_pruned(rule: Rule) -> None:
    torch.manual_seed(0)
    model, inputs = CrossAttention().double(), (torch.randn(2, 5, 8), torch.randn(2, 7, 8))
    inputs = tuple(tensor.double() for tensor in inputs)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), inputs)
    names = {weight.name for weight in pdp_fx.explain(prepared).weights}
    assert names == {"attention.in_proj_weight", "attention.out_proj.weight"}
    train(prepared, [inputs])
    pdp_fx.step(prepared)
    left = check_converted(model, prepared.eval(), [inputs])
    zeros = sum(int((left.get_parameter(name) == 0).sum()) for name in names)
    assert zeros == sum(left.get_parameter(name).numel() for name in names) / 2


class SharedSums(nn.Module):
    """Two weights are computed from each parameter, so that neither value can be written into one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.one + self.other), self.one - self.other)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
def test_weights_that_are_parts_of_others_are_refused_with_the_reason(rule: Rule) -> None:
    with pytest.raises(
        SpecError, match=r"one: a zero in it makes no zero in the weight that %add \(test_computed"
    ):
        pdp_fx.prepare(SharedSums(), PruneSpec(rule), torch.randn(2, 6))


class Scaled(nn.Module):
    """The scale of a weight stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 8, 3), nn.Parameter(torch.rand(8, 1, 1, 1))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.scale * self.conv.weight, self.conv.bias)
        return self.head(functional.relu(x))


def test_channels_of_a_scaled_weight_are_ranked_by_the_weight() -> None:
    prepared = pdp_fx.prepare(Scaled(), PruneSpec(Channels(ratio=0.5)), torch.randn(2, 3, 6, 6))
    (group,) = pdp_fx.explain(prepared).groups
    assert group.producers == ("conv",)
    assert set(group.masked) == {"conv"}
    assert "scale[0]" in group.members


def channels_of(layer: nn.Module) -> fx.GraphModule:
    """A layer of 8 channels, a BatchNorm and another layer, prepared to lose channels."""
    net = nn.Sequential(layer, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    prepared = pdp_fx.prepare(net, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), torch.randn(2, 3, 6, 6))
    pdp_fx.step(prepared)
    return prepared


@pytest.mark.parametrize(
    "computed",
    [parametrizations.weight_norm, torch.nn.utils.weight_norm, parametrizations.spectral_norm],
    ids=["weight_norm", "weight_g", "spectral_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_channels_of_a_computed_weight_are_masked_and_ranked_as_those_of_a_weight(
    computed: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    layer = computed(nn.Conv2d(3, 8, 3)).eval()
    prepared = channels_of(layer)
    (group,) = pdp_fx.explain(prepared).groups
    assert group.masked == ("1",), "ahead of BatchNorm a mask would be in its statistics"
    (_, mask), *others = pruner_of(prepared).mask_items()
    assert not others
    scores = cast(ChannelPolicy, mask).scores(*parameters_of(prepared, mask))
    torch.testing.assert_close(scores, cast(Tensor, layer.weight).flatten(1).square().mean(1).sqrt())


class Rooted(nn.Module):
    """The square root of a weight, whose gradient is infinite at 0."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.sign() * weight.abs().sqrt()


def rooted(layer: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Rooted())


@pytest.mark.parametrize("computed", [parametrizations.weight_norm, rooted], ids=["normed", "rooted"])
def test_whole_rows_of_a_computed_weight_may_go(computed: Callable[[nn.Linear], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 8)
    with torch.no_grad():
        layer.weight[3] *= 0.001
    model = nn.Sequential(computed(layer), nn.ReLU(), nn.Linear(8, 4)).double()
    spec = PruneSpec(Unstructured(0.5), {"2": None}, AT_ONCE)
    prepared = pdp_fx.prepare(model, spec, torch.randn(2, 6).double())
    pdp_fx.step(prepared)
    train(prepared, [(torch.randn(2, 6).double(),)])
    assert all(weight.isfinite().all() for weight in prepared.parameters())
    converted = check_converted(model, prepared.eval(), [(torch.randn(3, 6).double(),)])
    (left,) = (weight for weight in converted.parameters() if weight.shape == (8, 6))
    assert int((left == 0).sum()) == 24
    assert not left[3].any()


class FromBuffer(nn.Module):
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 6))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(functional.linear(x, self.weight)).relu())


def test_channels_of_a_buffer_stay() -> None:
    with pytest.raises(SpecError, match="weight is a buffer, which is not trained; make it a parameter"):
        pdp_fx.prepare(FromBuffer(), PruneSpec(Channels(ratio=0.5)), torch.randn(2, 6))


def test_rows_that_are_cut_off_stay_and_are_listed() -> None:
    net = nets_weights.HalfOfWeight()
    prepared = pdp_fx.prepare(net, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), torch.randn(2, 5, 6))
    found = pdp_fx.explain(prepared)
    assert [(group.name, group.width) for group in found.groups] == [("hidden", 8)]
    assert [(kept.width, kept.why) for kept in found.kept if "hidden" in kept.group] == [
        (4, "the model cuts these rows off and never uses them")
    ]
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared).get_parameter("hidden.weight").shape == (8, 6)


def test_multiply_accumulates_are_those_of_the_weight_that_is_computed() -> None:
    x = torch.randn(1, 5, 6)
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.HalfOfWeight(), x).rows}
    assert rows == {"hidden": 5 * 6 * 8, "head": 5 * 8 * 5}
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.CatOfWeights(), x).rows}
    assert rows["q"] == rows["k"] == rows["v"] == 5 * 6 * 8
    rows = {row.layer: row.macs for row in pdp_fx.report(nets_weights.LowRankAdapter(), x).rows}
    assert (rows["hidden"], rows["up"]) == (5 * 6 * 8, None)


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(ratio=0.5)])
def test_what_torch_itself_has_pruned_stays_pruned(rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    l1_unstructured(model[0], "weight", 0.25)
    x = torch.randn(4, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), x)
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    left = dict(check_converted(model, prepared.eval(), [(x,)]).named_parameters())
    assert "0.weight_orig" in left


def norm_free(rule: Rule) -> tuple[nn.Module, fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    model, x = nets_weights.NormFreeBlock().double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    return model, pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), x), x


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(1, 2), Channels(ratio=0.5)])
def test_a_standardised_weight_is_written_down(rule: Rule) -> None:
    model, prepared, x = norm_free(rule)
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    train(prepared, [(x,)])
    left = dict(check_converted(model, prepared.eval(), [(x,)]).named_parameters())
    # Two convolutions have an odd number of input channels, which leaves no groups of two.
    assert {name for name in left if "gain" in name} == (
        {"stem.gain", "deep.gain"} if isinstance(rule, NM) else set()
    )
    if isinstance(rule, NM):
        narrow = left["narrow.weight"].reshape(-1, 2)
        assert bool(((narrow == 0).sum(1) == 1).all())


class Renewed(nn.Linear):
    """Training shortens the weight before it is standardised."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
        return functional.linear(input, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Clamped(nn.Linear):
    """Training shortens the weight."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(input)


class Measured(nn.Linear):
    """Training shortens the weight after its shape has been read."""

    def forward(self, input: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.training:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
        return functional.linear(input, self.weight.flatten().reshape(shape), self.bias)


class Viewed(nn.Linear):
    """Training shortens the weight after it has been read, which a view of it sees."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.view(8, 8)
        if self.training:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
        return functional.linear(input, weight - weight.mean(1, keepdim=True), self.bias)


def spectral(inputs: int, outputs: int) -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(inputs, outputs))


class Stream(nn.Module):
    """The layers of a residual stream have one mask, which is computed ahead of the first of them."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.head = kind(8, 8), kind(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.second(functional.relu(x)))


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4), Channels(ratio=0.5)])
@pytest.mark.parametrize("kind", [Renewed, Clamped, Measured, Viewed, spectral])
def test_weights_that_change_while_training_are_those_that_the_model_uses(
    kind: Callable[[int, int], nn.Module], rule: Rule
) -> None:
    torch.manual_seed(0)
    model, x = Stream(kind).double(), torch.randn(4, 8, dtype=torch.float64)
    if kind is Viewed and isinstance(rule, Channels):
        with pytest.raises(SpecError, match="a dropped channel is not 0 when it is read here"):
            pdp_fx.prepare(model, PruneSpec(rule), x)
        return
    wanted = copy.deepcopy(model)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), x)
    assert torch.equal(prepared(x), wanted(x))
    pdp_fx.step(prepared)
    train(prepared, [(x,)] * 2)
    check_converted(model, prepared.eval(), [(x,)])


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda given: torch.linalg.qr(given).Q,
    "transposed": lambda given: functional.normalize(given.t().contiguous(), dim=1).t(),
    "by rows": lambda given: torch.linalg.qr(given).Q.contiguous(),
}


@pytest.mark.parametrize("way", COMPUTED)
def test_channels_of_one_length_are_the_same_whatever_way_a_weight_lies_in_memory(way: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 8)
            self.given = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            hidden = functional.relu(self.first(x)) @ COMPUTED[way](self.given)
            return self.last(functional.relu(hidden))

    torch.manual_seed(18)
    model, x = Model().double(), torch.randn(3, 5, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    converted = check_converted(model, prepared.eval(), [(x,)])
    assert converted.get_parameter("last.weight").shape[1] < 16


def test_a_weight_that_is_said_to_need_gradients_is_not_written_to() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parametrizations.spectral_norm(nn.Linear(6, 16))
            self.out = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            for parameter in self.inner.parameters():
                parameter.requires_grad_(True)
            return self.out(functional.relu(self.inner(x)))

    torch.manual_seed(0)
    model, x = Critic().double(), torch.randn(5, 6, dtype=torch.float64)
    for rule in (Unstructured(0.5), Channels(ratio=0.5)):
        prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=AT_ONCE), x)
        pdp_fx.step(prepared)
        train(prepared, [(x,)] * 2)
        converted = check_converted(model, prepared.eval(), [(x,)])
    assert converted.get_parameter("out.weight").shape == (1, 8)


class IteratedInEval(nn.Linear):
    """Spectral norm as it is often written by hand: every call goes a step on, in eval mode, too."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.left = nn.Parameter(functional.normalize(torch.randn(8), dim=0), requires_grad=False)
        self.right = nn.Parameter(functional.normalize(torch.randn(8), dim=0), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        self.right.data = functional.normalize(self.weight.data.t() @ self.left.data, dim=0)
        self.left.data = functional.normalize(self.weight.data @ self.right.data, dim=0)
        return functional.linear(input, self.weight / self.left.dot(self.weight.mv(self.right)), self.bias)


def test_convert_leaves_no_steps_of_its_own_runs_in_the_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(IteratedInEval(), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    for _ in range(2):
        torch.testing.assert_close(converted(x), prepared(x))


def test_computed_weights_are_explained() -> None:
    _, prepared, _ = norm_free(Channels(ratio=0.5))
    found = pdp_fx.explain(prepared)
    assert {weight.parameter for weight in found.computed} == PRUNED["NormFreeBlock"] - {"head.weight"}
    assert all("nets_weights.py" in weight.source for weight in found.computed)
    assert "written down by convert" in str(found)
    _, prepared, _ = norm_free(Unstructured(0.5))
    assert "(nets_weights.py" not in str(pdp_fx.explain(prepared).skipped)


def test_what_is_ranked_is_the_weight_that_the_layer_uses() -> None:
    """A gain decides between the rows, and the raw weight, whose scale is lost, does not."""
    torch.manual_seed(0)
    model, x = nets_weights.NormFreeBlock(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        model.narrow.gain.fill_(1.0)[1:3] = 0.1
        model.narrow.weight[1:3] *= 100
    prepared = pdp_fx.prepare(
        model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE, allocation="uniform"), x
    )
    pdp_fx.step(prepared)
    kept = pdp_fx.convert(prepared.eval()).get_parameter("grouped.weight")
    with torch.no_grad():
        rows = model.narrow.gain.flatten() > 0.5
    assert kept.shape[0] == 2
    assert rows.tolist() == [True, False, False, True]


def test_the_gradient_reaches_all_that_a_weight_is_computed_from() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6)
    model = nets_weights.LowRankAdapter()
    model.hidden.weight.requires_grad_(False)
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    prepared.train()(x).square().sum().backward()
    for adapter in (model.up, model.down):
        assert adapter.grad is not None
        assert float(adapter.grad.abs().sum()) > 0
    merged = pdp_fx.convert(prepared.eval())
    assert {name for name, _ in merged.named_parameters()} == {
        f"{n}.{p}" for n in ("hidden", "head") for p in ("weight", "bias")
    }


def test_a_copy_and_a_resumed_model_prune_the_same_computed_weights() -> None:
    _, prepared, x = norm_free(Unstructured(0.7))
    pdp_fx.step(prepared)
    train(prepared, [(x,)])
    _, resumed, _ = norm_free(Unstructured(0.7))
    resumed.load_state_dict(prepared.state_dict())
    expected = pdp_fx.convert(prepared.eval())(x)
    for other in (resumed, copy.deepcopy(prepared)):
        assert torch.equal(pdp_fx.convert(other.eval())(x), expected)


class Rounded(torch.autograd.Function):
    """Rounds; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class Quantised(nn.Linear):
    """Weights of a few bits; the scale is that of the largest, or twice the mean."""

    def __init__(self, inputs: int, outputs: int, levels: int, of_mean: bool) -> None:
        super().__init__(inputs, outputs)
        self.levels, self.of_mean = levels, of_mean

    def forward(self, input: Tensor) -> Tensor:
        size = self.weight.abs()
        scale = (2 * size.mean() if self.of_mean else size.amax()) / self.levels
        rounded = cast(Tensor, Rounded.apply(self.weight / scale))
        return functional.linear(input, rounded.clamp(-self.levels, self.levels) * scale, self.bias)


@pytest.mark.long
@pytest.mark.parametrize("levels", [1, 3, 7])
@pytest.mark.parametrize("of_mean", [False, True])
def test_where_a_quantised_weight_is_masked_does_not_hang_on_its_values(levels: int, of_mean: bool) -> None:
    x, resumed = torch.randn(6, 32), list[fx.GraphModule]()
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(Quantised(32, 24, levels, of_mean), nn.ReLU(), Quantised(24, 8, levels, of_mean))
        prepared = pdp_fx.prepare(net, PruneSpec(Unstructured(0.5), schedule=AT_ONCE), x)
        masked = [str(node.args[0]) for node in prepared.graph.nodes if node.name.endswith("masked")]
        assert masked == ["_0_weight", "_2_weight"]
        resumed.append(prepared)
    first, *others = resumed
    pdp_fx.step(first)
    for other in others:
        other.load_state_dict(first.state_dict())
        assert torch.equal(other.eval()(x), first.eval()(x))
    torch.testing.assert_close(pdp_fx.convert(first)(x), first(x))


class Centred(nn.Linear):
    """Its weight may be the parameter less its mean: then zeros of the parameter are none of the weight."""

    centred = False

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight * 2
        mean = weight.mean() if self.centred else 0
        return functional.linear(input, weight - mean, self.bias)


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4), Channels(0.5)])
def test_a_checkpoint_whose_masks_are_in_other_places_is_refused_once_they_prune(rule: Rule) -> None:
    layer, x = Centred(8, 8), torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 2))
    spec = PruneSpec(rule, schedule=AT_ONCE)
    plain = pdp_fx.prepare(model, spec, x)
    layer.centred = True
    computed, again = (pdp_fx.prepare(model, spec, x) for _ in range(2))
    assert plain.state_dict().keys() == computed.state_dict().keys()
    computed.load_state_dict(plain.state_dict())
    for trained, other, places in ((plain, computed, "2.weight"), (computed, plain, "no parameter")):
        pdp_fx.step(trained)
        with pytest.raises(RuntimeError, match=f"on what is computed from {places}.*begin with 'pdp"):
            other.load_state_dict(trained.state_dict())
        dense = {name: value for name, value in trained.state_dict().items() if not name.startswith("pdp.")}
        other.load_state_dict(dense)
    again.load_state_dict(computed.state_dict())
    assert torch.equal(again.eval()(x), computed.eval()(x))


class Cosine(nn.Linear):
    """Its rows have norm 1, so that rounding would choose among its channels."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, functional.normalize(self.weight, dim=1), self.bias)


def test_rows_of_one_norm_go_alike_in_any_precision_and_compiled() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    layers = (nn.Linear(8, 16), nn.ReLU(), Cosine(16, 16), nn.Tanh())
    model = nn.Sequential(
        *layers, parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 3)
    )
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(0.5), schedule=AT_ONCE), x)
    train(prepared, [(x,)])
    pdp_fx.step(prepared.eval())
    expected = prepared(x)
    torch.testing.assert_close(copy.deepcopy(prepared).double()(x.double()).float(), expected)
    torch.testing.assert_close(torch.compile(prepared)(x), expected)
    torch.testing.assert_close(pdp_fx.convert(prepared)(x), expected)


def test_the_report_counts_zeros_of_the_computed_weight() -> None:
    _, prepared, _ = norm_free(Unstructured(0.5))
    pdp_fx.step(prepared)
    rows = pdp_fx.report(prepared).rows
    converted = pdp_fx.report(pdp_fx.convert(prepared.eval())).rows
    assert [row.left for row in rows] == [row.left for row in converted]
    assert sum(row.left for row in rows) == round(0.5 * sum(row.weights for row in rows))


class Largest(WeightPolicy):
    """Keeps what it was told of, to see that a policy is given the weights that layers use."""

    def __init__(self, site: MaskSite) -> None:
        super().__init__(site)
        self.told: Tensor | None = None

    def soft(self, weight: Tensor) -> Tensor:
        return self.hard(weight)

    @classmethod
    def update(cls, masks: Sequence[Self], weights: Sequence[tuple[Tensor, ...]], now: Progress) -> None:
        for mask, (weight,) in zip(masks, weights, strict=True):
            mask.told = weight.clone()


def test_policies_are_told_the_computed_weight() -> None:
    model, prepared, _ = norm_free(Unstructured(0.5, policy=Largest))
    pdp_fx.step(prepared)
    told = {mask.parameters_read[0]: mask.told for _, mask in pruner_of(prepared).mask_items()}
    stem = cast(nets_weights.ScaledStandardised, model.get_submodule("stem"))
    rows = stem.weight.flatten(1)
    rows = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    expected = rows * stem.gain.view(-1, 1) * rows.shape[1] ** -0.5
    torch.testing.assert_close(told["stem.weight"], expected.view_as(stem.weight))


class OuterProduct(nn.Module):
    """A weight of rank one, made of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(6))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(functional.linear(x, torch.outer(self.left, self.right))))


def test_the_entries_of_a_vector_are_channels() -> None:
    model, x = OuterProduct().double(), torch.randn(2, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(ratio=0.5), schedule=AT_ONCE), x)
    pdp_fx.step(prepared)
    small = check_converted(model, prepared.eval(), [(x,)])
    assert torch.equal(small.get_parameter("left"), model.left[model.left.abs() > model.left.abs().median()])


def test_computed_weights_compile_in_one_piece() -> None:
    _, prepared, x = norm_free(Channels(ratio=0.5))
    pdp_fx.step(prepared)
    compiled = torch.compile(prepared.train(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), prepared(x))


def test_a_weight_that_is_drawn_in_every_run_is_left_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    prepared = pdp_fx.prepare(nets_weights.DrawnWeight(), PruneSpec(Unstructured(0.5), schedule=AT_ONCE), x)
    found = pdp_fx.explain(prepared)
    assert [weight.name for weight in found.weights] == ["head.weight"]
    assert not found.computed
    assert {name for name, _ in found.skipped} == {"hidden", "spread"}
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert not torch.equal(converted(x), converted(x))
