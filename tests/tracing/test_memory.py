import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing.steps import InexactError
from tests.tracing.checks import exact, opaque, targets


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y
        y += x
        y.mul_(2)
        return F.relu(y, inplace=True) + z


class ThroughView(Base):
    """Changes a tensor through a view of it, and never looks at the view again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0].add_(1)
        y[:, 1:3] = 0
        y.view(-1).clamp_(max=0.5)
        return y * 2


class Mask(Base):
    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_zeros(x.shape[0], 4)
        for i, rows in enumerate((slice(0, -1), slice(-1, None))):
            mask[rows, i] = i + 1
        return self.linear(x) + mask


class Counter(Base):
    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x - self.mean)


class ThroughData(Counter):
    """Changes buffers and a weight through other tensors that share their memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        self.mean.detach()[1:].mul_(0.9).add_(x[:, 1:].mean(0), alpha=0.1)
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return self.linear(x)


class Codebook(Base):
    """Moves the codes that it has just computed distances to, unseen by autograd; gradients need the old."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.rand(5, 4))
        self.unseen = nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.unseen
        nearest = torch.cdist(x, self.codes).argmin(1)
        found = (x @ self.codes.t()).softmax(1) @ self.codes
        if self.training:
            self.codes.data.lerp_(x.data.mean(0), 0.1)
            self.unseen.data.mul_(0.9)
        found.data.clamp_(max=0.9)
        return found.sigmoid() + self.codes[nearest]


class Replaces(Base):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.linear(x - self.mean)


@pytest.mark.parametrize("kind", [InPlace, ThroughView, Mask, Counter, ThroughData, Codebook])
def test_changes_in_place_happen_in_the_graph(kind: type[Base]) -> None:
    gm = exact(kind(), torch.randn(3, 4), torch.randn(5, 4))
    before = targets(gm)
    gm.graph.eliminate_dead_code()
    assert targets(gm) == before


def test_a_weight_that_every_run_changes_is_left_as_it_was() -> None:
    class Decays(Base):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return self.linear(x)

    assert "mul_" in targets(exact(Decays(), torch.randn(3, 4), torch.randn(5, 4)))


def test_a_parameter_that_is_put_elsewhere_is_missed_in_the_graph() -> None:
    """The graph would leave it as it was, which no output of the same call shows."""

    class Puts(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                self.linear.bias.set_(self.linear.bias * 0.9)  # pyright: ignore[reportArgumentType]
            return y

    with pytest.raises(InexactError, match="it leaves another value in a parameter"):
        trace(Puts(), torch.randn(3, 4))
    gm = exact(nn.Sequential(nn.Linear(4, 4), Puts()), torch.randn(3, 4))
    assert list(opaque(gm)) == ["1"]


def test_a_replaced_buffer_is_overwritten() -> None:
    gm = exact(nn.Sequential(nn.Linear(4, 4), Replaces()), torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)
    assert "copy_" in targets(gm)
    exact(Replaces(), torch.randn(3, 4))


def test_an_input_is_changed_as_the_model_changes_it() -> None:
    class Changes(Base):
        def forward(self, x: Tensor) -> Tensor:
            x.sub_(1)
            return self.linear(x)

    gm = exact(Changes(), torch.randn(3, 4))
    x = torch.zeros(3, 4)
    gm(x)
    assert torch.equal(x, -torch.ones(3, 4))


def test_an_input_is_changed_a_second_time_as_the_model_changes_it() -> None:
    class Changes(Base):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            y = self.linear(x.clone())
            # It changes nothing on the example.
            x.clamp_(-50, 50)
            return y

    gm = exact(Changes(), torch.randn(3, 4))
    x = torch.full((3, 4), 100.0)
    gm(x)
    assert torch.equal(x, torch.full((3, 4), 50.0))


def test_a_function_that_returns_its_argument_does_not_take_its_place() -> None:
    class Skip(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x.contiguous(), 0.5, training=self.training)
            return x + self.linear(y)

    gm = exact(Skip(), torch.randn(3, 4))
    add = next(node for node in gm.graph.nodes if "add" in node.name)
    assert add.args[0].op == "placeholder"


def test_a_region_without_gradients_has_none() -> None:
    class Partly(Base):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.linear(x).norm()
            return self.linear(x) / scale

    exact(Partly(), torch.randn(3, 4))


def test_a_region_without_autocast_has_none() -> None:
    class Partly(Base):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = x @ x.t()
            return self.linear(x).sum() * y

    model = Partly()
    gm = exact(model, torch.randn(3, 4))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gm(x).dtype == model(x).dtype
        assert torch.equal(gm(x), model(x))


def test_a_dtype_read_from_a_tensor_follows_it() -> None:
    class Norm(Base):
        def forward(self, x: Tensor) -> Tensor:
            before = x.dtype
            y = self.linear(x).to(torch.float32)
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))
            z = torch.zeros(x.shape, dtype=self.linear.weight.dtype)
            return (y.to(before) + z).softmax(-1, dtype=torch.float32).to(x.dtype)

    model = Norm()
    gm = exact(model, torch.randn(3, 4))
    assert {node.args[0].name for node in gm.graph.nodes if node.target is getattr} == {"linear_weight", "x"}
    x = torch.randn(3, 4)
    model.bfloat16()
    assert gm(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(gm(x.bfloat16()), model(x.bfloat16()))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def test_a_dtype_follows_through_the_arguments_of_functions() -> None:
    class Cast(Base):
        def forward(self, x: Tensor) -> Tensor:
            wide = cast(x, torch.float32) * 1.01
            spectrum = torch.fft.rfft(self.linear(x).double())
            part = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
            part[..., :2] = spectrum[..., :2]
            return cast(wide, self.linear.weight.dtype) + torch.fft.irfft(part).to(x.dtype)

    model = Cast()
    gm = exact(model, torch.randn(3, 4))
    (made,) = (node for node in gm.graph.nodes if node.target is torch.zeros)
    assert made.kwargs["dtype"].target is getattr
    x = torch.randn(3, 4).bfloat16()
    model.bfloat16()
    assert gm(x).dtype == torch.bfloat16
    assert torch.equal(gm(x), model(x))


class Pads(nn.Module):
    """Torch itself passes dtypes on here: to the mask of padding, and to a mask of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 4)
        prune.l1_unstructured(self.last, "weight", 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, key_padding_mask=x[..., 0] > 9)
        return self.last(y)


@pytest.mark.parametrize("model", [Pads(), nn.Sequential(Pads())], ids=["own", "inside"])
def test_a_dtype_follows_through_functions_of_torch(model: nn.Module) -> None:
    gm = exact(model, torch.randn(2, 5, 4))
    x = torch.randn(2, 5, 4).bfloat16()
    model.bfloat16()
    for mine, own in ((gm, model), (copy.deepcopy(gm), model)):
        assert torch.equal(mine.eval()(x), own.eval()(x))


def test_a_tensor_made_before_the_run_is_a_constant() -> None:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    class Scaled(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * scale) + torch.from_numpy(scale.numpy().copy())

    gm = exact(Scaled(), torch.randn(3, 4))
    assert gm.get_buffer("_tensor_constant0") is scale
    assert list(gm.state_dict()) == ["linear.weight", "linear.bias"]


def test_a_tensor_from_code_that_nobody_sees_is_no_constant() -> None:
    class Hidden(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.Tensor(3, 4).fill_(1)

    gm = exact(nn.Sequential(Hidden()), torch.randn(3, 4))
    assert "torch functions do not show" in opaque(gm)["0"]
    with pytest.raises(TraceError, match="the forward of Hidden itself"):
        trace(Hidden(), torch.randn(3, 4))


def test_every_operator_is_written_as_such() -> None:
    class Operators(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y = 2.0 ** (y**2 / 8) + (3 / (y.abs() + 1)) - (1 - y) * -y + (5 // (y.detach().abs() + 1)) % 2
            y **= 2
            y /= 2
            y -= 1
            z = (y > 0) & ~(x >= 0) | (x < y) ^ (x != y)
            return (y @ x.t()).sum() + z + abs(y) + 7 % (y.detach().abs() + 1)

    gm = exact(Operators(), torch.randn(3, 4))
    assert {"pow", "truediv", "sub", "mul", "floordiv", "mod", "gt", "and_", "invert", "matmul"} <= set(
        targets(gm)
    )
