"""Branches that ask whether anything is selected, as layers of experts do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdp_fx.tracing import branches
from tests.tracing.checks import Around, exact, opaque

EXPERTS, WIDTH = 4, 4


class Experts(nn.Module):
    """Each row goes through two of the layers; how a layer finds its rows is up to the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            self.send(x, weights, chosen == number, expert, out)
        return out

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        """Add what an expert makes of the rows that a mask, (rows, 2), selects."""
        raise NotImplementedError


class ByCount(Experts):
    """Skips a layer to which no row goes: by the number of rows."""

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        rows, places = torch.where(mask)
        if rows.numel() == 0:
            return
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])


class ByLength(ByCount):
    """The same by their truth."""

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        rows, places = mask.nonzero(as_tuple=True)
        if len(rows):
            out[rows] += expert(x[rows]) * weights[rows, places, None]


class BySize(ByCount):
    """The same by a size."""

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        rows, places = torch.where(mask)
        if rows.shape[0] >= 1:
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])


class ByAny(Experts):
    """The same by whether any row is selected."""

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        rows = mask.any(dim=-1)
        if rows.view(-1).any():
            out[rows] += expert(x[rows]) * (weights * mask).sum(-1)[rows].unsqueeze(1)


class BySum(Experts):
    """The same by a sum."""

    def send(self, x: Tensor, weights: Tensor, mask: Tensor, expert: nn.Module, out: Tensor) -> None:
        rows = mask.any(dim=-1)
        if rows.sum() > 0:
            out[rows] += expert(x[rows]) * (weights * mask).sum(-1)[rows].unsqueeze(1)


@pytest.mark.parametrize("kind", [ByCount, ByLength, BySize, ByAny, BySum])
def test_layers_to_which_no_row_may_go_are_followed(kind: type[Experts]) -> None:
    torch.manual_seed(0)
    # One row goes to two of four layers.
    gm = exact(Around(kind()), torch.randn(5, WIDTH), *(torch.randn(1, WIDTH) for _ in range(6)))
    assert not opaque(gm)


class Scaled(nn.Module):
    """Takes a factor, too, which may be left out, so that the graph checks what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = ByCount()

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = self.experts(x)
        return y if factor is None else torch.where(factor > 0, y, -y)


def test_they_are_where_the_graph_checks_its_inputs() -> None:
    torch.manual_seed(0)
    gm = exact(Scaled(), (torch.randn(5, WIDTH), torch.ones(1)), (torch.randn(1, WIDTH), torch.zeros(1)))
    assert not opaque(gm)


class Positive(nn.Module):
    """Does something with the rows whose first number is positive, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        rows = self.linear(x)[mask]
        return self.made(x, mask, rows)

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """What is made of them."""
        raise NotImplementedError


class MeanOrNone(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return rows.mean(0) if rows.shape[0] > 0 else torch.zeros(4)


class LeastOrNone(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return rows.sum(0) + 1 if mask.any() else rows.sum(0)


class AllIfAny(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return x * 2 if mask.any() else x


class Fails(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        if rows.numel() == 0:
            raise ValueError("no row is positive")
        return rows.sum(0)


class OfNumbers(Positive):
    """A sum of numbers may be 0, though they are not."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        sign = x[:, 0].sign()
        if sign.sum() == 0:
            return x
        return x + self.linear(x) * sign[:, None]


class DrawsForRows(Positive):
    """What is drawn does not follow the number of rows."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return x.index_add(0, mask.nonzero().squeeze(1), rows) * torch.rand(4) if mask.any() else x


class ClampsIfAny(Positive):
    """What is done to all numbers changes none of the example's."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        return x.clamp(-5, 5) if (x > 90).any() else x


class ClampsIfRows(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        if rows.numel() > 0:
            x = x.clamp(-5, 5)
        return x


class ClampsInTraining(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        if self.training and mask.any():
            x = (x + torch.rand(1)).clamp(-5, 5) if mask.shape[0] > 2 else x.clamp(-5, 5).view(x.shape)
        return x


class ClampsAndFills(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        if mask.any():
            x = x.clamp(-5, 5).masked_fill(mask[:, None], 0.0)
        return x


class ClampsInPlace(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        y = x * 1
        if rows.numel() > 0:
            y[mask] = rows
            y.clamp_(-5, 5)
        return y


class AsksForFewer(Positive):
    """What is asked about is less than what is written to."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        places = mask.nonzero().squeeze(1)
        if places[1:].numel() > 0:
            x = x.index_fill(0, places, 7.0)
        return x


class AsksForSome(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        places = mask.nonzero().squeeze(1)
        some = places[x[places, 1] > -20]
        if some.numel() > 0:
            x = x.index_fill(0, places, 7.0)
        return x


class RoundsBefore(Positive):
    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        share = x.abs().mean(1) / 100
        if share.to(torch.int64).any():
            x = x.masked_fill(share.bool()[:, None], 7.0)
        return x


class WritesToOthers(Positive):
    """Where it writes to, there is nothing in the example."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        others = (x[:, 1] < -8).nonzero().squeeze(1)
        if mask.any():
            x = x.index_fill(0, others, 7.0)
        return x


class WritesToThird(Positive):
    """Each of two selections of a run writes to where the other one is."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        masks = [x[:, i] > 0 for i in range(4)]
        for number, chosen in enumerate(masks):
            if chosen.any():
                x = x.masked_fill(masks[(number + 2) % 4][:, None], 7.0 + number)
        return x


class LargestOfParts(Positive):
    """Zeros are the largest where all else is less, which they are not in the example."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        parts = [x + 100 * (x > -10)]
        if rows.numel() > 0:
            part = torch.zeros_like(x)
            part[mask] = rows
            parts.append(part)
        return torch.stack(parts).amax(0)


KINDS = [
    MeanOrNone, LeastOrNone, AllIfAny, Fails, OfNumbers, DrawsForRows, ClampsIfAny, ClampsIfRows,
    ClampsInTraining, ClampsAndFills, ClampsInPlace, AsksForFewer, AsksForSome, WritesToOthers,
    WritesToThird, RoundsBefore, LargestOfParts,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_something_for_no_rows_stays_whole(kind: type[Positive]) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(30, 4) for _ in range(4)]
    if kind is not Fails:
        examples += [-torch.rand(3, 4), torch.tensor([[1.0] * 4, [-1.0] * 4]), -30 * torch.rand(3, 4)]
    gm = exact(Around(kind()), *examples)
    assert list(opaque(gm)) in (["inner"], ["made"])


class FillsInTraining(Positive):
    """What training mode alone does."""

    def made(self, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        if self.training:
            x = x * torch.rand(1)
            if mask.any():
                x = x.masked_fill(mask[:, None], 0.0)
        return x


def test_a_branch_of_one_mode_is_followed() -> None:
    gm = exact(Around(FillsInTraining()), torch.randn(6, 4), -torch.rand(3, 4), torch.rand(2, 4))
    assert not opaque(gm)


def test_one_branch_that_stays_whole_leaves_others_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Around(ByCount()), Around(ClampsIfAny()), Around(ByAny()), Around(MeanOrNone()))
    gm = exact(model, torch.randn(30, 4), torch.randn(20, 4))
    assert set(opaque(gm)) == {"made", "made_"}


class UntilNone(nn.Module):
    """Goes on until nothing is selected, which a recording that goes on as if anything were never ends."""

    def forward(self, x: Tensor) -> Tensor:
        large = x > 0.5
        while large.any():
            x = torch.where(large, x * 0.5, x)
            large = x > 0.5
        return x


def test_a_loop_until_nothing_is_selected_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MOST_ASKED", 100)
    gm = exact(Around(UntilNone()), torch.randn(3, 4), 9 * torch.randn(5, 4))
    assert "branches on the numbers" in opaque(gm)["inner"]


def insist(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


class Checked(nn.Module):
    """Refuses numbers that are too small, in a way that asks whether all are large enough."""

    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check((x > -9).all())
        return x * 2


def test_an_assertion_of_torch_is_checked_by_the_graph() -> None:
    gm = exact(Around(Checked(lambda ok: torch._assert(ok, "too small"))), torch.randn(3, 4))
    assert not opaque(gm)
    assert "_assert_scalar" in gm.code
    small = torch.zeros(3, 4)
    with torch.no_grad():
        gm.get_parameter("before.bias").fill_(-10)
        gm.get_parameter("before.weight").zero_()
    with pytest.raises(RuntimeError, match="too small|failed"):
        gm(small)


@pytest.mark.parametrize("ask", [bool, torch.Tensor.item])
def test_what_fails_as_if_nothing_held_is_kept_whole(ask: Callable[[Tensor], bool]) -> None:
    gm = exact(Around(Checked(lambda ok: insist(ask(ok), "too small"))), torch.randn(3, 4), torch.zeros(2, 4))
    assert set(opaque(gm)) == {"inner"}
