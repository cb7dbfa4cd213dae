"""Branches that leave a mask out where it masks nothing, as models with padding have them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, TraceError
from tests.channels.checks import check_converted, train
from tests.tracing.checks import exact, opaque

WIDTH, PADDING = 8, 1


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Encoder(nn.Module):
    """Reads rows of tokens, some of which may be padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.whole = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.wide, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.read(tokens == PADDING, self.table(tokens))
        return self.out(functional.relu(self.wide(self.norm(x))))

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        """What is made of the rows."""
        raise NotImplementedError


class LeftOut(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        x = 1 * x
        x.masked_fill_(padding.unsqueeze(-1), 0.5)
        x = x * (1 - padding.unsqueeze(-1).type_as(x))
        mask = padding if padding.any() else None
        for _ in range(2):
            x = x + self.whole(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return x


class WithWeights(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        mask = None if padding.sum() == 0 else padding
        return x + self.whole(x, x, x, key_padding_mask=mask)[0]


class AskedOften(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        padded = padding.any()
        x = self.drop(x)
        if padded:
            x = x * (1 - padding.unsqueeze(-1).to(x.dtype))
        scores = heads(self.q(x)) @ heads(self.k(x)).transpose(-1, -2) / math.sqrt(4)
        scores = scores.flatten(0, 1)
        if padded:
            scores = scores.view(len(x), 2, *scores.shape[1:])
            scores = scores.masked_fill(padding[:, None, None], float("-inf"))
            scores = scores.view(-1, *scores.shape[2:])
        scores = scores.unflatten(0, (-1, 2))
        x = x + (self.drop(scores.softmax(-1)) @ heads(self.v(x))).transpose(1, 2).flatten(2)
        return torch.where(padding.unsqueeze(-1), torch.zeros_like(x), x) if padded else x


class WrittenInto(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        x = self.q(x)
        if padding.any():
            x[padding] = 0
        return x


class Added(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        bias = None
        if padding.any():
            bias = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -1e4)[:, None, None]
        q, k, v = (heads(each(x)) for each in (self.q, self.k, self.v))
        return x + functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)


class AllKept(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        kept = ~padding
        q, k, v = (heads(each(x)) for each in (self.q, self.k, self.v))
        if kept.all():
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None])
        return x + y.transpose(1, 2).flatten(2)


class Given(Encoder):
    """Whether something is padding is told."""

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if padding is not None and not padding.any():
            padding = None
        x = self.table(tokens)
        x = x + self.whole(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.out(functional.relu(self.wide(self.norm(x))))


FULL = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 2, 3, 5]])
PADDED = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 2, PADDING, PADDING]])
LARGE = torch.tensor([[9, 3, 4, 9, 6], [7, 8, 2, 3, 9]])


@pytest.mark.parametrize("example", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("kind", [LeftOut, WithWeights, AskedOften, WrittenInto, Added, AllKept])
def test_a_mask_that_may_mask_nothing_is_followed(kind: type[Encoder], example: Tensor) -> None:
    torch.manual_seed(0)
    gm = exact(kind(), example, FULL, PADDED, torch.cat([FULL, PADDED.flip(0), FULL]), PADDED[1:])
    assert not opaque(gm)


@pytest.mark.parametrize("example", [FULL, PADDED], ids=["full", "padded"])
def test_a_mask_that_is_given_and_may_mask_nothing_is_followed(example: Tensor) -> None:
    torch.manual_seed(0)
    calls = [(tokens, tokens == PADDING) for tokens in (example, FULL, PADDED, PADDED[1:])]
    assert not opaque(exact(Given(), *calls))


def test_channels_go_behind_a_mask_that_may_mask_nothing() -> None:
    torch.manual_seed(0)
    model = LeftOut().double()
    spec = PruneSpec(Channels(ratio=0.5, through_norms=True), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(model, spec, FULL)
    pdp_fx.step(prepared)
    train(prepared, [(FULL,), (PADDED,)])
    converted = check_converted(model, prepared.eval(), [(FULL,), (PADDED,)])
    assert converted.get_parameter("out.weight").shape[1] < 16
    assert converted.get_parameter("table.weight").shape[1] < WIDTH


class LargeToo(Encoder):
    """Masks what is large, too, as no number of the example is."""

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        return torch.where(padding.unsqueeze(-1) | (x > 9), 0.0, x) if padding.any() else x


class Clamps(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        return x.clamp(-9, 9) if padding.any() else x


class Another(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        return self.q(x) if padding.any() else self.k(x)


class Copies(Encoder):
    """Without padding there is one tensor, else two."""

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        x = self.q(x)
        y = x * (~padding).unsqueeze(-1) if padding.any() else x
        y.add_(1)
        return x + self.k(y)


class FillsInPlace(Encoder):
    """What was 0 with the mask is written to."""

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        bias = (padding if padding.any() else torch.zeros_like(padding)).to(x.dtype).unsqueeze(-1)
        bias.add_(x.mean(-1, keepdim=True))
        return x + bias


class EitherMask(Encoder):
    """Clamps if one of two masks masks any; the second is looked at only if the first does not."""

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5) if padding.any() or (x > 9).any() else x


class ByAnother(Encoder):
    """What one mask is asked about is done with the other."""

    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        masks = padding, x[..., 0] > 9
        for mask, other in (masks, masks[::-1]):
            if mask.any():
                x = x.masked_fill(other.unsqueeze(-1), 7.0)
        return x


class Counts(Encoder):
    """Makes booleans of counts, which are 0 or 1 in the example."""

    def forward(self, tokens: Tensor) -> Tensor:
        counts = (tokens > 2).long() + (tokens > 8).long()
        padding = tokens == PADDING
        if padding.any():
            counts = self.counted(counts, padding)
        return self.out(self.wide(self.table(tokens) * counts.unsqueeze(-1)))

    def counted(self, counts: Tensor, padding: Tensor) -> Tensor:
        return torch.logical_and(counts, ~padding)


class CountsBits(Counts):
    def counted(self, counts: Tensor, padding: Tensor) -> Tensor:
        return counts & (~padding).long()


class CountsAny(Counts):
    def counted(self, counts: Tensor, padding: Tensor) -> Tensor:
        return torch.logical_or(counts, padding)


class CountsOfBooleans(Counts):
    """A product with whole numbers makes whole numbers of booleans, whose sum is another."""

    def forward(self, tokens: Tensor) -> Tensor:
        large, padding = tokens > 8, tokens == PADDING
        if padding.any():
            large = large * (~padding).long()
        return self.out(self.wide(self.table(tokens) * (large + large + 1).unsqueeze(-1)))


class Twice(Encoder):
    def read(self, padding: Tensor, x: Tensor) -> Tensor:
        return x.add(padding.unsqueeze(-1), alpha=2) if padding.all() else x


KINDS = [LargeToo, Clamps, Another, Copies, FillsInPlace, EitherMask, ByAnother, Twice]


@pytest.mark.parametrize("example", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_with_a_branch_that_does_more_than_to_mask_stays_whole(
    kind: type[Encoder], example: Tensor
) -> None:
    torch.manual_seed(0)
    gm = exact(kind(), example, FULL, PADDED, PADDED[1:], LARGE)
    assert list(opaque(gm)) == ["read"]


@pytest.mark.parametrize("example", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("kind", [Counts, CountsBits, CountsAny, CountsOfBooleans])
def test_what_makes_booleans_of_counts_is_no_mask(kind: type[Counts], example: Tensor) -> None:
    with pytest.raises(TraceError, match="where nothing is selected it differs"):
        exact(kind(), example)
