"""N:M along the input channels, whichever axis of the parameter that is."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule
from tests.channels.checks import check_converted, train


class Turned(nn.Module):
    """Weights whose input channels lie along axes 0, 1 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 8, 2, stride=2)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.deconv = nn.Parameter(torch.randn(8, 4, 2, 2))
        self.rows = nn.Parameter(torch.randn(4, 12))
        self.query = nn.Parameter(torch.randn(12, 2, 6))
        self.stack = nn.Parameter(torch.randn(2, 5, 12))
        self.mixed = nn.ConvTranspose1d(8, 8, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 4, h, w) to (2, n, 5)."""
        x = functional.conv_transpose2d(self.conv(self.up(x)).relu(), self.deconv).relu()
        x = torch.addmm(torch.ones(12, dtype=x.dtype), x.mean((2, 3)), self.rows)
        x = torch.einsum("bi,inh->bnh", x, self.query).flatten(1).relu()
        x = self.mixed(x[:, :8, None]).repeat(1, 2, 1)[:, :12, 0]
        return torch.bmm(x.expand(2, -1, -1), self.stack.mT)


AXES = {"up.weight": 0, "conv.weight": 1, "deconv": 0, "rows": 0, "query": 0, "stack": 2}


@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_groups_lie_along_the_input_channels_of_any_axis(forward: Literal["soft", "hard"]) -> None:
    torch.manual_seed(0)
    model, x = Turned().double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    spec = PruneSpec(NM(2, 4), schedule=Schedule(0, 1.0), forward=forward, pruned_decay=1e-3)
    prepared = pdp_fx.prepare(model, spec, (x,))
    found = pdp_fx.explain(prepared)
    assert {weight.name for weight in found.weights} == set(AXES)
    ((left_out, why),) = found.skipped
    assert left_out == "mixed"
    assert why.startswith("it is a transposed convolution in groups")
    train(prepared, [(x,)])
    pdp_fx.step(prepared)
    rows = {row.layer: row for row in pdp_fx.report(prepared, x).rows}
    assert all(rows[name.removesuffix(".weight")].sparsity == 0.5 for name in AXES)
    left = dict(check_converted(model, prepared.eval(), [(x,)]).named_parameters())
    for name, axis in AXES.items():
        groups = left[name].movedim(axis, -1).unflatten(-1, (-1, 4))
        assert torch.equal((groups == 0).sum(-1), torch.full(groups.shape[:-1], 2)), name


class Far(nn.Module):
    """A weight whose input channels lie along its last of four axes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 8) to (n, 2, 3, 5)."""
        return torch.einsum("bi,opqi->bopq", x, self.weight)


@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_groups_lie_along_an_axis_that_is_far_from_the_others_place(forward: Literal["soft", "hard"]) -> None:
    torch.manual_seed(0)
    model, x = Far().double(), torch.randn(2, 8, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(NM(1, 4), schedule=Schedule(0, 1.0), forward=forward), (x,))
    pdp_fx.step(prepared)
    assert torch.isfinite(prepared(x)).all()
    left = check_converted(model, prepared.eval(), [(x,)]).get_parameter("weight").detach()
    groups, before = left.unflatten(-1, (-1, 4)), model.weight.detach().unflatten(-1, (-1, 4))
    assert torch.equal(groups.abs().sum(-1), before.abs().amax(-1))


class Joined(nn.Module):
    """A product that sums over two axes of its weight, of which the first counts as its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 8, 3) to (n, 5)."""
        return torch.einsum("bnh,nho->bo", x, self.weight)


def test_the_first_axis_that_a_product_sums_over_has_the_input_channels() -> None:
    torch.manual_seed(0)
    prepared = pdp_fx.prepare(Joined(), PruneSpec(NM(2, 4), schedule=Schedule(0, 1.0)), torch.randn(2, 8, 3))
    pdp_fx.step(prepared)
    left = pdp_fx.convert(prepared).get_parameter("weight")
    assert bool((left.unflatten(0, (-1, 4)) == 0).sum(1).eq(2).all())


class Experts(nn.Module):
    """Tokens in the order of their experts, each multiplied with the matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Map (n, 16) to (n, 4)."""
        product: Any = getattr(torch, "_grouped_mm")  # noqa: B009
        return self.head(product(x, self.weight.mT, offs=offsets))


class Gated(nn.Module):
    """A mixture of experts: rows in the order of theirs, widened, gated and narrowed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 16)), nn.Parameter(torch.randn(3, 16, 16))
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
        """Map (n, 8) to (n, 4)."""
        product: Any = getattr(torch, "_grouped_mm")  # noqa: B009
        rows = self.stem(x)[order]
        gate, up = product(rows, self.up.mT, offs=offsets).chunk(2, -1)
        rows = product(torch.nn.functional.silu(gate) * up, self.down.mT, offs=offsets)
        return self.head(torch.zeros_like(self.stem(x)).index_add(0, order, rows))


def test_channels_of_experts_go_together() -> None:
    torch.manual_seed(0)
    order, offsets = torch.tensor([3, 0, 1, 5, 2, 4]), torch.tensor([1, 4, 6], dtype=torch.int32)
    inputs = torch.randn(6, 8), order, offsets
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0), allocation="uniform")
    prepared = pdp_fx.prepare(Gated(), spec, inputs)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    shapes = {name: tuple(weight.shape) for name, weight in converted.named_parameters()}
    assert shapes["up"] == (3, 16, 8)
    assert shapes["down"] == (3, 8, 8)
    assert shapes["head.weight"] == (4, 8)
    others = torch.randn(6, 8), order.flip(0), torch.tensor([2, 2, 6], dtype=torch.int32)
    for given in (inputs, others):
        assert torch.allclose(converted(*given), prepared(*given), atol=1e-5)
    expert = next(row for row in pdp_fx.report(prepared).rows if row.shape == (3, 32, 16))
    assert expert.macs == 16 * 32


def test_the_matrices_of_grouped_products_are_weights() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 16), torch.tensor([1, 4, 6], dtype=torch.int32)
    spec = PruneSpec(NM(2, 4), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(Experts(), spec, inputs)
    assert {weight.name for weight in pdp_fx.explain(prepared).weights} == {"weight", "head.weight"}
    pdp_fx.step(prepared)
    left = pdp_fx.convert(prepared).get_parameter("weight")
    assert bool((left.unflatten(-1, (-1, 4)) == 0).sum(-1).eq(2).all())


@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_experts_keep_rows_that_a_grouped_product_can_read(ratio: float) -> None:
    """It reads rows of a multiple of 16 bytes."""
    torch.manual_seed(0)
    inputs = torch.randn(6, 8), torch.randperm(6), torch.tensor([1, 4, 6], dtype=torch.int32)
    prepared = pdp_fx.prepare(Gated(), PruneSpec(Channels(ratio), schedule=Schedule(0, 1.0)), inputs)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    assert torch.allclose(converted(*inputs), prepared(*inputs), atol=1e-5)
    up, down = converted.get_parameter("up"), converted.get_parameter("down")
    assert all(size % 8 == 0 for size in (*up.shape[1:], *down.shape[1:]))
    assert up.numel() < 3 * 32 * 16
