"""Sizes that depend on the numbers in a tensor: how many edges are no loops, how many rows are positive."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.channels.nets_pictures import SeesPictures, pictured_text
from tests.tracing.checks import Around, exact, opaque

EDGES = torch.tensor([[0, 1, 1, 2, 3, 3], [1, 1, 2, 0, 3, 0]])
FEWER = torch.tensor([[0, 0, 1, 2, 3, 3], [0, 0, 2, 2, 3, 0]])


class Convolves(nn.Module):
    """A graph convolution that gives each node one loop, in place of those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        if edges.size(0) != 2:
            raise ValueError("edges go from one node to another")
        loops = torch.arange(x.size(0)).expand(2, -1)
        weight = torch.cat([x.new_ones(edges.size(1)), x.new_full((x.size(0),), 0.5)])
        ends = torch.cat([edges, loops], 1)
        rows = self.linear(x)[ends[0]] * weight[:, None] / edges.numel()
        return torch.zeros(x.size(0), rows.size(1)).index_add_(0, ends[1], rows)


class Picks(nn.Module):
    """Acts on the rows with a positive number; what is done with how many they are is up to a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.scales = (1.0, 2.0, 3.0, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x[x[:, 0] > 0])
        if self.kind == "compared":
            return rows.sum(0) if rows.shape[0] > 2 else rows.mean(0)
        if self.kind == "empty":
            return rows.sum(0) if rows.numel() else x.sum(0)
        if self.kind == "counted":
            return torch.stack([rows[row] * row for row in range(rows.shape[0])]).sum(0)
        if self.kind == "cast":
            return rows.sum(0) * int(rows.shape[0])
        return rows.sum(0) * self.scales[rows.shape[0] % 4]


class PicksTwice(nn.Module):
    """Picks rows twice, in its own forward, and asks whether they are as many, or how many they are."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        rows, others = x[x[:, 0] > 0], x[x[:, 0].gt(0)]
        if self.asks == "as many" and rows.shape[0] - others.shape[0] > 0:
            rows = rows[: others.shape[0]]
        if self.asks == "how many" and rows.shape[0] > 2:
            rows = rows * 2
        return self.linear(rows + others).sum(0)


def test_a_decision_by_such_sizes_in_the_models_own_forward_is_checked_if_it_comes_out_the_same() -> None:
    gm = exact(PicksTwice("as many"), torch.randn(8, 4), torch.randn(5, 4))
    assert not opaque(gm)


def test_one_that_is_cast_stays_a_computation() -> None:
    gm = exact(Around(Picks("cast")), *(torch.randn(6, 4) for _ in range(6)))
    assert not opaque(gm)


def test_one_that_comes_out_otherwise_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match="size that depends on the numbers in a tensor"):
        trace(PicksTwice("how many"), torch.randn(5, 4))


def test_what_only_computes_with_such_sizes_is_looked_into() -> None:
    gm = exact(
        Convolves(), (torch.randn(4, 4), EDGES), (torch.randn(4, 4), FEWER), (torch.randn(7, 4), EDGES)
    )
    assert not opaque(gm)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("compared", "decides by a size that depends on the numbers in a tensor"),
        ("empty", "decides by a size that depends on the numbers in a tensor"),
        ("counted", "goes up to a size that depends on the numbers in a tensor"),
        ("picks", "decides by a size that depends on the numbers in a tensor"),
    ],
)
def test_what_does_something_else_with_one_stays_whole(kind: str, reason: str) -> None:
    gm = exact(Around(Picks(kind)), *(torch.randn(6, 4) for _ in range(6)))
    assert reason in opaque(gm)["inner"]


def in_a_list(rows: Tensor) -> list[int]:
    return [rows.size(0)] if rows.size(0) > 0 else [1]


def appended(rows: Tensor) -> list[int]:
    found: list[int] = []
    _append(found, rows)
    return found


def _append(found: list[int], rows: Tensor) -> None:
    found.append(rows.size(0) if rows.size(0) > 0 else 1)


class Counts(nn.Module):
    """Decides by such a size, in a method, and divides by what that returns."""

    def __init__(self, count: Callable[[Tensor], list[int]]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), count

    def counted(self, rows: Tensor) -> list[int]:
        return self.count(rows)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x[x[:, 0] > 0])
        return rows.sum(0) / self.counted(rows)[0]


@pytest.mark.parametrize("count", [in_a_list, appended])
def test_one_that_comes_out_of_what_decides_by_it_is_no_constant(count: Callable[..., list[int]]) -> None:
    torch.manual_seed(0)
    model, signs = Counts(count), torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
    others = signs.flip(0) * torch.rand(4, 4), torch.rand(4, 4)
    gm = exact(Around(model), signs * torch.rand(4, 4), *others)
    assert len(opaque(gm)) == 1
    assert "inner" not in opaque(gm)


class ScattersRows(nn.Module):
    """Adds messages up in a new tensor of their kind, whose size is that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        told = self.linear(x)[edges[0]]
        sizes: list[int | None] = [None]
        for rows in (told.new_zeros(x.shape[0], 4).index_add_(0, edges[1], told), x):
            self.note(sizes, rows)
        return rows.new_zeros(x.shape[0], 4).index_add(0, edges[1], told)

    def note(self, sizes: list[int | None], rows: Tensor) -> None:
        if sizes[0] is None:
            sizes[0] = rows.shape[0]
        elif sizes[0] != rows.shape[0]:
            raise ValueError("as many as before")


def test_what_is_made_of_a_given_size_has_that() -> None:
    gm = exact(
        ScattersRows(), (torch.randn(4, 4), EDGES), (torch.randn(4, 4), FEWER), (torch.randn(7, 4), EDGES)
    )
    assert not opaque(gm)


def by_rows(model: "Hands", x: Tensor) -> Tensor:
    rows = model.linear(x[x[:, 0] > 0])
    return rows.sum(0) if rows.shape[0] > 2 else rows.mean(0)


class Hands(nn.Module):
    """Hands itself to a function, which decides by such a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return by_rows(self, x)


def test_the_reason_is_that_of_the_function_to_which_a_module_hands_itself() -> None:
    gm = exact(Around(Hands()), *(torch.randn(6, 4) for _ in range(6)))
    assert "decides by a size that depends on the numbers in a tensor" in opaque(gm)["inner"]
    assert "in a function to which it passes a Hands" in opaque(gm)["inner"]


def test_sizes_of_others_stay_known_where_rows_are_written_into_them_or_multiply_them() -> None:
    words, patches, counts = pictured_text(2)
    gm = exact(SeesPictures().double(), (words, patches, counts), pictured_text(3))
    assert set(opaque(gm)) == {"pictures", "places"}
    # The message of a check says how many rows there are, which may be more or less next time.
    words[0, 4] = 0
    more = torch.cat([patches, patches[:1]])
    assert gm(words, more, counts + torch.tensor([1, 0])).shape == (2, 5, 3)
    with pytest.raises(RuntimeError, match="the check at nets_pictures"):
        gm(words, patches, counts)


class Coordinates(nn.Module):
    """Takes the coordinates of what a mask selects apart, as a form says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x).gt(0).nonzero()
        if self.form == "rows":
            return sum((self.linear(x[row]) for row, _ in found), x.sum(0))
        if self.form == "unbind":
            row, column = found.unbind(1)
        else:
            row, column = found.T
        return x[row, column] * row


@pytest.mark.parametrize("form", ["of T", "unbind"])
def test_coordinates_are_taken_apart_by_axis(form: str) -> None:
    gm = exact(Coordinates(form), *(torch.randn(size, 4) for size in (6, 6, 5, 9)))
    assert not opaque(gm)


def test_a_loop_over_them_stays_whole() -> None:
    gm = exact(nn.Sequential(Coordinates("rows")), *(torch.randn(6, 4) for _ in range(4)))
    assert "goes up to a size that depends on the numbers in a tensor" in opaque(gm)["0"]
