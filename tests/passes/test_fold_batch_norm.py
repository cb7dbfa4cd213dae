from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pdp_fx import Unstructured
from pdp_fx.compiler import Context
from pdp_fx.example_inputs import normalised
from pdp_fx.ops.kinds import named_modules
from pdp_fx.passes.fix_mode import FixMode
from pdp_fx.passes.fold_batch_norm import FoldBatchNorm
from pdp_fx.trace import trace
from tests.nets import at_once, convert_until, difference, listing, net, pruned, shake

FOLDED = """\
x = input
conv = conv(x)
relu = relu(conv)
head = head(relu)"""


def test_the_norm_is_gone_and_the_layer_has_a_bias() -> None:
    model, x = net("small")
    gm, _ = convert_until(pruned(model, Unstructured(0.5), x), "fold-batch-norm")
    assert listing(gm) == FOLDED
    assert gm.get_parameter("conv.bias").shape == (4,)


def fold(model: nn.Module, x: Tensor, inputs: bool = True) -> tuple[fx.GraphModule, bool]:
    """Trace, fold, and check that nothing changes to 14 digits."""
    model = shake(model).double().eval()
    gm = trace(model, x.double() if inputs else None).eval()
    expected = model(x.double())
    ctx = Context(at_once(Unstructured(0.5)), normalised(x.double()) if inputs else None)
    FixMode().run(gm, ctx)
    edited = FoldBatchNorm().run(gm, ctx)
    gm.recompile()
    torch.testing.assert_close(gm(x.double()), expected, rtol=1e-13, atol=1e-13)
    return gm, edited


def norms(gm: fx.GraphModule) -> list[str]:
    called = {str(node.target) for node in gm.graph.find_nodes(op="call_module")}
    return [name for name, module in named_modules(gm) if name in called and "Norm" in type(module).__name__]


IMAGE = (2, 4, 5, 5)
PAIRS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), IMAGE),
    "without bias": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), IMAGE),
    "without affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), IMAGE),
    "across processes": (nn.Conv2d(4, 6, 3), nn.SyncBatchNorm(6), IMAGE),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), IMAGE),
    "conv3d": (nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), (2, 2, 3, 3, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), IMAGE),
    "grouped transposed": (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), IMAGE),
    "depthwise transposed": (nn.ConvTranspose1d(4, 4, 3, groups=4), nn.BatchNorm1d(4), (2, 4, 5)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (3, 4)),
}


@pytest.mark.parametrize(("layer", "norm", "shape"), PAIRS.values(), ids=PAIRS)
def test_every_kind_of_layer_folds_exactly(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    gm, edited = fold(nn.Sequential(layer, norm), torch.randn(shape))
    assert edited
    assert norms(gm) == []


def test_all_pairs_of_a_chain_fold() -> None:
    chain = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
    assert norms(fold(chain, torch.randn(IMAGE))[0]) == []


class SameSize(nn.Conv2d):
    """Pads as the input wants it, then convolves with its own weight."""

    def forward(self, input: Tensor) -> Tensor:
        size = self.weight.shape[-1] // 2
        padded = functional.pad(input, (size, size, size, size))
        return functional.conv2d(padded, self.weight, self.bias, self.stride)


class Standardised(nn.Conv2d):
    """Convolves with a weight that it computes."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(input, weight, self.bias)


class Flipped(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return functional.conv_transpose2d(input.flip(-1), self.weight, self.bias, groups=self.groups)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(2 * input, self.weight, self.bias)


class NormAndReLU(nn.BatchNorm2d):
    """BatchNorm by the function, and an activation."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        of_batch = self.training or not self.track_running_stats
        x = functional.batch_norm(input, *statistics, self.weight, self.bias, of_batch, 0.1, self.eps)
        return functional.relu(x)


class AlwaysOfTheBatch(nn.BatchNorm2d):
    """Has running statistics, and never uses them."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        return functional.batch_norm(input, *statistics, self.weight, self.bias, True, 0.0, self.eps)


OWN_LAYERS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...], bool]] = {
    "pads": (SameSize(4, 6, 3), nn.BatchNorm2d(6), IMAGE, True),
    "pads, no bias": (SameSize(4, 6, 3, bias=False), nn.BatchNorm2d(6), IMAGE, True),
    "flips": (Flipped(4, 6, 3, groups=2), nn.BatchNorm2d(6), IMAGE, True),
    "doubles": (Doubled(4, 6, bias=False), nn.BatchNorm1d(6), (3, 4), True),
    "doubles rows": (Doubled(4, 6), nn.BatchNorm1d(5), (3, 5, 4), False),
    "standardises": (Standardised(4, 6, 3), nn.BatchNorm2d(6), IMAGE, False),
    "norm by a function": (nn.Conv2d(4, 6, 3, bias=False), NormAndReLU(6), IMAGE, True),
    "norm without scale": (SameSize(4, 6, 3, bias=False), NormAndReLU(6, affine=False), IMAGE, True),
    "norm with its own eps": (SameSize(4, 6, 3), NormAndReLU(6, eps=0.5), IMAGE, True),
    "norm that never uses its statistics": (SameSize(4, 6, 3), AlwaysOfTheBatch(6), IMAGE, False),
    "norm of the batch": (SameSize(4, 6, 3), NormAndReLU(6, track_running_stats=False), IMAGE, False),
}


@pytest.mark.parametrize(("layer", "norm", "shape", "folds"), OWN_LAYERS.values(), ids=OWN_LAYERS)
def test_layers_of_users_fold_by_what_they_do(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...], folds: bool
) -> None:
    gm, edited = fold(nn.Sequential(layer, norm), torch.randn(shape))
    left = [node for node in gm.graph.nodes if node.target is functional.batch_norm]
    assert edited == folds
    assert bool(left or norms(gm)) != folds


class Reads(nn.Module):
    """Two layers and two norms, put together by a function."""

    def __init__(self, use: Callable[["Reads", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 1)
        self.last = nn.BatchNorm2d(4)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def read_twice(m: Reads, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y) + y


def called_twice(m: Reads, x: Tensor) -> Tensor:
    return m.bn(m.conv(m.conv(x)))


def norm_called_twice(m: Reads, x: Tensor) -> Tensor:
    return m.bn(m.other(m.bn(m.conv(x))))


def norm_first(m: Reads, x: Tensor) -> Tensor:
    return m.conv(m.bn(x))


def weight_read_elsewhere(m: Reads, x: Tensor) -> Tensor:
    return m.bn(m.conv(x)) + m.conv.weight.sum()


def norm_behind_relu(m: Reads, x: Tensor) -> Tensor:
    return m.bn(torch.relu(m.conv(x)))


def returned_too(m: Reads, x: Tensor) -> Tensor:
    y = m.conv(x)
    return torch.cat([m.bn(y), y])


class HasMethod(Reads):
    """A method that is kept whole reads the weight."""

    def scaled(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e9:
            return x
        return x * self.conv.weight.sum()


def weight_read_by_a_method(m: Reads, x: Tensor) -> Tensor:
    return m.scaled(m.bn(m.conv(x))) if isinstance(m, HasMethod) else x


@pytest.mark.parametrize(
    "use",
    [
        read_twice,
        called_twice,
        norm_called_twice,
        norm_first,
        weight_read_elsewhere,
        norm_behind_relu,
        returned_too,
        weight_read_by_a_method,
    ],
)
def test_a_norm_that_somebody_else_would_miss_stays(use: Callable[[Reads, Tensor], Tensor]) -> None:
    gm, edited = fold(HasMethod(use), torch.randn(2, 4, 3, 3))
    assert not edited
    assert norms(gm) == ["bn"]


def test_a_shared_weight_stays_and_so_do_both_norms() -> None:
    model = Reads(lambda m, x: m.last(m.other(m.bn(m.conv(x)))))
    model.other.weight = model.conv.weight
    gm, edited = fold(model, torch.randn(2, 4, 3, 3))
    assert not edited
    assert norms(gm) == ["bn", "last"]


def test_shared_statistics_stay() -> None:
    model = Reads(lambda m, x: m.last(m.other(m.bn(m.conv(x))))).double()
    model.last.running_mean = model.bn.running_mean
    assert norms(fold(model, torch.randn(2, 4, 3, 3))[0]) == ["bn", "last"]


def test_a_norm_without_statistics_stays() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    assert norms(fold(model, torch.randn(2, 4, 3, 3))[0]) == ["1"]


def test_a_layer_with_a_hook_stays() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4))
    model(torch.randn(2, 4, 3, 3))
    assert norms(fold(model, torch.randn(2, 4, 3, 3))[0]) == ["1"]


@pytest.mark.parametrize(
    ("layer", "example", "other"),
    [(nn.Linear(4, 6), (3, 4), (3, 6, 4)), (nn.Conv1d(6, 6, 1), (4, 6, 6), (6, 6))],
)
def test_what_was_folded_is_held_to_the_axes_that_the_norm_had(
    layer: nn.Module, example: tuple[int, ...], other: tuple[int, ...]
) -> None:
    gm, edited = fold(nn.Sequential(layer, nn.BatchNorm1d(6)), torch.randn(example))
    assert edited
    with pytest.raises(AssertionError, match="_0 has taken a BatchNorm in, .* its output has . axes"):
        gm(torch.randn(other, dtype=torch.float64))


@pytest.mark.parametrize("length", [5, 6])
def test_a_linear_of_sequences_has_its_outputs_on_another_axis(length: int) -> None:
    """BatchNorm1d reads axis 1 of (n, length, 6), even where the sequence is as long as the layer is wide."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(length))
    assert norms(fold(model, torch.randn(3, length, 4))[0]) == ["1"]


def test_an_image_without_a_batch_axis_has_its_channels_on_another_axis() -> None:
    model = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6))
    assert norms(fold(model, torch.randn(4, 6))[0]) == ["1"]


def test_without_example_inputs_only_certain_norms_fold() -> None:
    images = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    rows = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert norms(fold(images, torch.randn(2, 4, 3, 3), inputs=False)[0]) == []
    assert norms(fold(rows, torch.randn(2, 4), inputs=False)[0]) == ["1"]


@pytest.mark.parametrize(
    ("dtype", "left"), [(torch.float16, ["1"]), (torch.bfloat16, []), (torch.float32, [])]
)
@pytest.mark.parametrize(("weight", "scale", "variance"), [(10.0, 1e3, 0.0), (1e-3, 1e-3, 6e4)])
def test_what_half_precision_has_no_room_for_stays(
    dtype: torch.dtype, left: list[str], weight: float, scale: float, variance: float
) -> None:
    conv, norm = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
    nn.init.constant_(conv.weight, weight)
    nn.init.constant_(norm.weight, scale)
    assert norm.running_var is not None
    norm.running_var.fill_(variance)
    model = nn.Sequential(conv, norm).to(dtype).eval()
    x = torch.full((2, 4, 3, 3), 1e-4, dtype=dtype)
    gm = trace(model, x).eval()
    ctx = Context(at_once(Unstructured(0.5)), normalised(x))
    FixMode().run(gm, ctx)
    FoldBatchNorm().run(gm, ctx)
    gm.recompile()
    assert norms(gm) == left
    assert gm(x).isfinite().all()


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_hook_on_either_keeps_the_norm(hook: str, place: int) -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval(), torch.randn(2, 4, 3, 3)
    gm = trace(model, x).eval()
    getattr(gm.get_submodule(str(place)), hook)(lambda *args: None)
    ctx = Context(at_once(Unstructured(0.5)), normalised(x))
    assert not FoldBatchNorm().run(gm, ctx)
    assert norms(gm) == ["1"]


def test_nothing_to_fold_edits_nothing() -> None:
    assert not fold(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))[1]


def test_folding_is_done_in_float64_and_kept_in_the_models_dtype() -> None:
    model, x = net("small")
    prepared = pruned(model, Unstructured(0.5), x).eval()
    gm, _ = convert_until(prepared, "fold-batch-norm")
    assert gm.get_parameter("conv.weight").dtype == torch.float32
    assert difference(prepared, gm, x) <= 1e-6
