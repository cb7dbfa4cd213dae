"""Channels along two axes of which one can be followed: the outer ones, or those inside if those stay."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, Inputs, sequences, signals, vectors

WIDTH, HEADS, SIZE, SHARED = 6, 3, 4, 2


def _with_bias(batch: int) -> Inputs:
    """Sequences, and a bias of attention for every head and pair of places."""
    (x,) = sequences()(batch)
    return x, torch.randn(batch, HEADS, x.shape[1], x.shape[1], dtype=x.dtype)


class MasksOfSpeakers(nn.Module):
    """A mask for each speaker is laid on one signal (Conv-TasNet): speakers stay, their features can go."""

    speakers = 3

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.hidden = nn.Conv1d(3, SIZE, 2, 2), nn.Conv1d(SIZE, WIDTH, 1)
        self.mask = nn.Conv1d(WIDTH, self.speakers * SIZE, 1)
        self.decode = nn.ConvTranspose1d(SIZE, 1, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encode(x).relu()
        masks = self.mask(self.hidden(features).relu()).view(x.shape[0], self.speakers, SIZE, -1).sigmoid()
        parts = (masks * features.unsqueeze(1)).view(x.shape[0] * self.speakers, SIZE, -1)
        return self.decode(parts).view(x.shape[0], self.speakers, -1)


class ExpertsAtOnce(nn.Module):
    """All experts see every example, in one product (a soft mixture): they stay, what is inside can go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)
        self.up = nn.Parameter(torch.randn(HEADS, WIDTH, 2 * SIZE))
        self.down = nn.Parameter(torch.randn(HEADS, 2 * SIZE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bd,edh->beh", x, self.up).relu()
        each = torch.einsum("beh,ehd->bed", hidden, self.down)
        return (each * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1)


class ExpertsThatMayBeIdle(nn.Module):
    """Each row goes through the experts that a gate chooses; one to which none goes is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.stem, self.out = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.up = nn.ModuleList(nn.Linear(8, 2 * SIZE) for _ in range(HEADS))
        self.down = nn.ModuleList(nn.Linear(2 * SIZE, 8) for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        rows, y = self.stem(x).relu(), torch.zeros(x.shape[0], 8, dtype=x.dtype)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            picked, place = torch.where(chosen == number)
            if picked.numel() == 0:
                continue
            y.index_add_(0, picked, down(up(rows[picked]).relu()) * weights[picked, place, None])
        return self.out(y)


class BiasOfHeads(nn.Module):
    """The model is given a bias for every head, so the heads stay; what is inside them can go."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x).view(x.shape[0], -1, HEADS, SIZE).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (self.heads(x, layer) for layer in (self.q, self.k, self.v))
        y = self.attend(q, k, v, bias)
        return x + self.out(y.transpose(1, 2).flatten(2))


class FusedBiasOfHeads(BiasOfHeads):
    """The same in one function, whose scale follows the number of channels."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)


class NormInHeadsThatStay(BiasOfHeads):
    """The channels inside heads that stay are scaled, by a weight that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SIZE) + 0.5)

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        return super().heads(x, layer) * self.scale


class SharedPartOfKeys(BiasOfHeads):
    """A part of each key is shared by all heads (multi-head latent attention): it stays, and heads can go."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (SIZE + SHARED))
        self.shared = nn.Linear(WIDTH, SHARED)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q = self.q(x).view(x.shape[0], -1, HEADS, SIZE + SHARED).transpose(1, 2)
        k, v = self.heads(x, self.k), self.heads(x, self.v)
        shared = self.shared(x).unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v, bias)
        return x + self.out(y.transpose(1, 2).flatten(2))


class SharedPartOfKeysThatStay(SharedPartOfKeys):
    """A bias for each head keeps the heads, so what is inside them can go, be it shared or not."""


class ConditionedStream(nn.Module):
    """One layer makes a shift, a scale and a gate for a stream (adaptive norms), which are cut apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.condition = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 3 * 8)
        self.table, self.norm = nn.Parameter(torch.randn(3, 8)), nn.LayerNorm(8, elementwise_affine=False)
        self.up, self.down, self.out = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def parts(self, each: Tensor) -> tuple[Tensor, ...]:
        return each.chunk(3, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        shift, scale, gate = self.parts(self.table + self.condition(x.mean(1)).view(-1, 3, 8))
        return self.out(y + gate * self.down(self.up(self.norm(y) * (1 + scale) + shift).relu()))


class ConditionedStreamBySlices(ConditionedStream):
    """The same, cut apart by slices of one index each."""

    def parts(self, each: Tensor) -> tuple[Tensor, ...]:
        return tuple(each[:, place : place + 1] for place in range(3))


class RareClasses(nn.Module):
    """A softmax in clusters: a rare class has a smaller layer, which runs only if it is among the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 6)
        self.classes = nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 10], div_value=2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.classes(self.second(self.first(x).relu()).relu(), targets).output


def _with_classes(batch: int) -> Inputs:
    """Vectors with classes of one cluster, which is another for each size of a batch."""
    (x,) = vectors()(batch)
    return x, torch.full((batch,), 7 * (batch % 3))


CHOICES: tuple[Construct, ...] = (
    Construct(MasksOfSpeakers, signals(), removed=2 + 3 + 6),
    Construct(ExpertsThatMayBeIdle, vectors(), removed=4 + HEADS * SIZE + HEADS * 4),
    Construct(ExpertsAtOnce, vectors(), removed=2 * SIZE),
    Construct(RareClasses, _with_classes, removed=4, reason="decides by its data"),
    Construct(BiasOfHeads, _with_bias, removed=18),
    Construct(FusedBiasOfHeads, _with_bias, removed=18),
    Construct(NormInHeadsThatStay, _with_bias, removed=18),
    Construct(SharedPartOfKeys, sequences(), removed=14, reason="which all have these"),
    Construct(SharedPartOfKeysThatStay, _with_bias, removed=16),
    Construct(ConditionedStream, sequences(), removed=6, through_norms=True),
    Construct(ConditionedStreamBySlices, sequences(), removed=6, through_norms=True),
)
