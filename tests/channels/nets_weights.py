"""Weights that are computed from parameters before they are used."""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from tests.channels.construct import Construct, conv_bn, images, sequences


class LowRankAdapter(nn.Module):
    """A weight and a product of two thin ones, added (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.down, self.up = nn.Parameter(torch.randn(4, 6) / 3), nn.Parameter(torch.randn(8, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hidden.weight + self.up @ self.down
        return self.head(F.relu(F.linear(x, weight, self.hidden.bias)))


class SumOfKernels(nn.Module):
    """A 1x1 kernel in the middle of a 3x3 one (re-parametrised convolutions)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(6, 5, 1)
        self.wide, self.point = nn.Conv2d(8, 6, 3), nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.wide.weight + F.pad(self.point.weight, (1, 1, 1, 1))
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), weight, self.wide.bias, padding=1)))


class MaskedKernel(nn.Module):
    """Pixels that must not be seen are blanked in the weight (PixelCNN)."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 8), nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 5, 1)
        self.register_buffer("seen", torch.rand(6, 8, 3, 3) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(F.relu(self.stem(x)), self.conv.weight * self.seen, self.conv.bias, padding=1)
        return self.head(F.relu(x))


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.shift = nn.Linear(6, 8), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.encoder(x)), self.encoder.weight.t(), self.shift)


class CatOfWeights(nn.Module):
    """Three layers run as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        packed = F.linear(x, torch.cat([self.q.weight, self.k.weight, self.v.weight]))
        q, k, v = packed.chunk(3, dim=-1)
        return self.head((q @ k.mT * 0.4).softmax(-1) @ v)


class HalfOfWeight(nn.Module):
    """Only some rows of a weight are used (slimmable nets)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.hidden.weight[:8], self.hidden.bias[:8]))
        return F.linear(x, self.head.weight[:, :8], self.head.bias)


class ScaledWeight(nn.Module):
    """A gain for each row is multiplied into the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 8), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 5, 1)
        self.gain = nn.Parameter(torch.randn(6, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(F.relu(self.stem(x)), self.conv.weight * self.gain.exp(), self.conv.bias)
        return self.head(F.relu(x))


class WeightFromInput(nn.Module):
    """A small net makes the kernel: its rows and columns are channels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.maker, self.head = conv_bn(3, 8), nn.Linear(8, 6 * 8), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        kernel = self.maker(x.mean((0, 2, 3))).view(6, 8, 1, 1)
        return self.head(F.relu(F.conv2d(x, kernel)))


class MixedKernels(nn.Module):
    """Kernels are mixed by weights of their own (conditional convolutions)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(6, 5, 1)
        self.experts, self.mix = nn.Parameter(torch.randn(3, 6, 8, 1, 1) / 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        kernel = (self.experts * self.mix.softmax(0).view(3, 1, 1, 1, 1)).sum(0)
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), kernel)))


class ParameterTables(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            [nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.randn(8, 8) / 3)]
        )
        self.named = nn.ParameterDict({"head": nn.Parameter(torch.randn(5, 8) / 3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.layers:
            x = F.relu(F.linear(x, weight))
        return F.linear(x, self.named["head"])


class InterpolatedPositions(nn.Module):
    """A grid of positions is resampled to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.hidden, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 5)
        self.grid = nn.Parameter(torch.randn(1, 9, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        grid = self.grid.reshape(1, 3, 3, 8).permute(0, 3, 1, 2)
        x = x + F.interpolate(grid, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(F.relu(self.hidden(x.flatten(2).transpose(1, 2))))


class WeightNorm(nn.Module):
    """Rows are scaled to a length of their own; the length runs over the columns that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.normed = conv_bn(3, 8), weight_norm(nn.Conv2d(8, 6, 3, padding=1))
        self.head = weight_norm(nn.Conv2d(6, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.normed(F.relu(self.stem(x)))))


class WeightNormByHook(nn.Module):
    """The same by a hook that computes the weight before every call."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.hidden, self.head = (
                nn.utils.weight_norm(nn.Linear(6, 8)), nn.utils.weight_norm(nn.Linear(8, 5)),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


class LengthOfWholeWeight(nn.Module):
    """One length for the whole weight: no row can go, since it is a part of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = weight_norm(nn.Linear(6, 8), dim=-1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


class UnitRows(nn.Module):
    """Rows are divided by their length: a row of zeros would be no number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True))))


class SafeUnitRows(UnitRows):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.linear(x, F.normalize(self.weight))))


class OrthogonalWeight(nn.Module):
    """Nobody knows what becomes of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = orthogonal(nn.Linear(6, 8)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


WEIGHTS = (
    Construct(LowRankAdapter, sequences(), removed=4),
    Construct(SumOfKernels, images(), removed=7),
    Construct(MaskedKernel, images(), removed=7),
    Construct(TiedAutoencoder, sequences(), removed=4),
    Construct(CatOfWeights, sequences(), removed=12),
    Construct(HalfOfWeight, sequences(), removed=4),
    Construct(ScaledWeight, images(), removed=7),
    Construct(WeightNorm, images(), removed=7),
    Construct(WeightNormByHook, sequences(), removed=8),
    Construct(LengthOfWholeWeight, sequences(), reason="norm"),
    Construct(UnitRows, sequences(), removed=4),
    Construct(SafeUnitRows, sequences(), removed=4),
    Construct(OrthogonalWeight, sequences(), reason="no channel rule for tril"),
    Construct(WeightFromInput, images()),
    Construct(MixedKernels, images(), removed=4),
    Construct(ParameterTables, sequences(), removed=8),
    Construct(InterpolatedPositions, images(), removed=8),
)
