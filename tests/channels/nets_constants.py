"""Constants that a model makes in its forward: tables with a value for each head or channel."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, images, sequences

HEADS, SIZE = 4, 3


class Slopes(nn.Module):
    """Attention whose heads look back less far the steeper their slope is (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, HEADS * SIZE) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, 6)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(t, device=x.device)
        far = (place[None, :] - place[:, None]).to(x.dtype)
        weight = (q @ k.transpose(-2, -1) * 0.5 + self.slopes(x, q)[:, None, None] * far).softmax(-1)
        return x + self.out((weight @ v).transpose(1, 2).flatten(2))

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, device=x.device, dtype=x.dtype))


class SlopesListed(Slopes):
    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.tensor([2.0 ** -(head + 1) for head in range(HEADS)], device=x.device, dtype=x.dtype)


class SlopesRaised(Slopes):
    """A base of no axes is raised to whole powers, and some more slopes are joined to these."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        base = torch.tensor(0.25, dtype=x.dtype)
        half = torch.pow(base, torch.arange(1, 1 + HEADS // 2))
        return torch.cat([half, torch.pow(base.sqrt(), torch.arange(1, HEADS, 2))])


class SlopesCounted(Slopes):
    """As many slopes as there are heads in a tensor."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.linspace(0.1, 1, q.shape[1], dtype=x.dtype)


class SlopesStacked(Slopes):
    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.stack([torch.tensor(0.3 * (head + 1), dtype=x.dtype) for head in range(HEADS)])


class SlopesSorted(Slopes):
    """What is done to the constant itself may be anything that can be done to it at every call."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.arange(1.0, HEADS + 1, dtype=x.dtype).cumsum(0).flip(0).sort(descending=True).values / 9


class SlopesOfBatch(Slopes):
    """Heads and examples on one axis, as in BLOOM."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(t, device=x.device).to(x.dtype).expand(b, t)
        bias = (self.slopes(x, q)[:, None] * place[:, None]).reshape(b * HEADS, 1, t)
        score = bias.baddbmm(q.reshape(b * HEADS, t, SIZE), k.reshape(b * HEADS, t, SIZE).transpose(1, 2))
        weight = score.softmax(-1) @ v.reshape(b * HEADS, t, SIZE)
        return x + self.out(weight.view(b, HEADS, t, SIZE).transpose(1, 2).reshape(b, t, HEADS * SIZE))


class SlopesDrawn(Slopes):
    """They are others at every call, so heads stay; what is inside them can go."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.rand(HEADS, dtype=x.dtype) * 0.0 + 1


class SlopesWritten(Slopes):
    """A slope is written over, so heads stay; what is inside them can go."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        slopes = torch.linspace(0.1, 1, HEADS, dtype=x.dtype)
        slopes[1] = 0.7
        return slopes


class SlopesOfLength(Slopes):
    """As many as the sequence of the example is long, by its length: heads stay, what is inside can go."""

    def slopes(self, x: Tensor, q: Tensor) -> Tensor:
        return torch.linspace(0.1, 1, x.shape[1] - 1, dtype=x.dtype)


class Waves(nn.Module):
    """Sines and cosines of the place are added to a stream, and computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        rate = torch.exp(torch.arange(0, 8, 2, dtype=x.dtype) * (-math.log(100.0) / 8))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rate
        x = x + torch.cat([angle.sin(), angle.cos()], dim=-1)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class WavesSideBySide(Waves):
    """Sines and cosines by turns."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        rate = torch.pow(50.0, -torch.arange(0, 8, 2, dtype=x.dtype) / 8)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * rate
        x = x + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class Scales(nn.Module):
    """A factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(self.act(F.relu(self.stem(x))))))

    def act(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2, 8, dtype=x.dtype).view(1, -1, 1, 1)


class ScalesOfAll(Scales):
    """A value for each channel and pixel, of which the model takes no other number."""

    def act(self, x: Tensor) -> Tensor:
        return x + torch.arange(8 * 36, dtype=x.dtype).reshape(8, 6, 6) / 99


class ScalesInTwoPlaces(nn.Module):
    """The same constant for the channels of two layers, which therefore lose the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.other, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 5), nn.Conv2d(8, 5, 1)
        self.last = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.logspace(-1, 0, x.new_zeros(8).numel(), dtype=x.dtype)[:, None, None]
        first, second = self.stem(x).relu() * scale, self.other(x).relu() + scale
        return self.head(first).mean((2, 3)) + self.last(second).mean((2, 3))


class WeightTimesConstant(Scales):
    """The rows of a weight are scaled."""

    def act(self, x: Tensor) -> Tensor:
        scale = torch.arange(1.0, 9, dtype=x.dtype)[:, None, None, None] / 4
        return F.relu(F.conv2d(x, self.mid.weight * scale, padding=1))


class Chosen(Scales):
    """The constant chooses channels."""

    def act(self, x: Tensor) -> Tensor:
        return x[:, (3 * torch.arange(8)) % 8] * torch.linspace(1, 2, 8, dtype=x.dtype)[:, None, None]


class Mixing(Scales):
    """Channels are mixed by a matrix of fixed numbers."""

    def act(self, x: Tensor) -> Tensor:
        mix = torch.cos(torch.arange(64, dtype=x.dtype)).view(8, 8)
        return torch.einsum("oc,bchw->bohw", mix, x)


class MixedByTable(Scales):
    """Channels are mixed by the products of two constants."""

    def act(self, x: Tensor) -> Tensor:
        mix = torch.linspace(1, 2, 8, dtype=x.dtype)[:, None] * torch.arange(8, dtype=x.dtype).cos()
        return F.linear(x.movedim(1, -1), mix).movedim(-1, 1)


class Reflected(nn.Module):
    """The columns of a weight are reflected; the identity is told how many there are by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 8), nn.Linear(8, 6)
        self.normal = nn.Parameter(torch.linspace(-1, 1, 8)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        normal = self.normal / self.normal.norm()
        reflection = torch.eye(self.normal.shape[0], dtype=x.dtype) - 2 * normal @ normal.t()
        return F.linear(self.inner(x).relu(), self.out.weight @ reflection, self.out.bias)


class MixedBesideItself(MixedByTable):
    """What is mixed has as many channels as before, and is added to them."""

    def act(self, x: Tensor) -> Tensor:
        return x + super().act(x)


class OfImageSize(Scales):
    """As many values as the image has rows, by chance as many as channels."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2, x.shape[2] + 2, dtype=x.dtype)[:8, None, None]


class ScaledByVector(nn.Module):
    """Something with one number for each channel, which may be made in a roundabout way, scales channels."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("order", torch.tensor(ORDER))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x) * self.of(x))

    def of(self, x: Tensor) -> Tensor:
        return self.scale[ORDER]


ORDER = [3, 1, 2, 0, 7, 6, 5, 4]


class NumbersInOrder(ScaledByVector):
    """Numbers of a range, in an order that a buffer holds."""

    def of(self, x: Tensor) -> Tensor:
        return torch.arange(8, dtype=x.dtype)[self.order].index_select(0, self.order)


class EqualNumbers(ScaledByVector):
    """Numbers that are equal because the ends of their range are."""

    def of(self, x: Tensor) -> Tensor:
        return torch.linspace(0.5, 0.5, 8, dtype=x.dtype)


class EverySecondNumber(ScaledByVector):
    """Every second number, by a step and by a mask."""

    def of(self, x: Tensor) -> Tensor:
        numbers = torch.linspace(0, 1, 32, dtype=x.dtype)[::2]
        return numbers[torch.arange(16) % 2 == 0]


CONSTANTS = (
    Construct(ScaledByVector, sequences(), removed=4),
    Construct(NumbersInOrder, sequences(), removed=4),
    Construct(EqualNumbers, sequences(), removed=4),
    Construct(EverySecondNumber, sequences(), removed=4),
    Construct(Slopes, sequences(), removed=18),
    Construct(SlopesListed, sequences(), removed=18),
    Construct(SlopesRaised, sequences(), removed=18),
    Construct(SlopesCounted, sequences(), removed=18),
    Construct(SlopesStacked, sequences(), removed=18),
    Construct(SlopesSorted, sequences(), removed=18),
    Construct(SlopesOfBatch, sequences(), removed=18),
    Construct(SlopesDrawn, sequences(), removed=24),
    Construct(SlopesWritten, sequences(), removed=24),
    Construct(SlopesOfLength, sequences(), removed=24),
    Construct(Waves, sequences(), removed=9, through_norms=True),
    Construct(WavesSideBySide, sequences(), removed=9, through_norms=True),
    Construct(Scales, images(), removed=8),
    Construct(ScalesOfAll, images(), removed=8),
    Construct(ScalesInTwoPlaces, images(), removed=8),
    Construct(WeightTimesConstant, images(), removed=8),
    Construct(Chosen, images(), removed=8),
    Construct(Mixing, images(), removed=8),
    Construct(MixedByTable, images(), removed=8),
    Construct(Reflected, sequences(), removed=4),
    Construct(MixedBesideItself, images(), removed=4, reason="is a constant, which is not trained"),
    Construct(OfImageSize, images(), removed=4, reason="values that have none"),
)
