"""Weights that are computed from parameters before they are used."""

import warnings
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

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


class KernelFromImages(nn.Module):
    """A kernel is made of an image, so what makes its places must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.stem = nn.Linear(3, 9), conv_bn(3, 8)
        self.head, self.out = nn.Conv2d(8, 4, 1), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel(x.mean((0, 2, 3)))
        y = F.conv2d(x, kernel.view(1, 1, 3, 3).expand(4, 3, 3, 3), padding=1)
        return (y + self.head(F.relu(self.stem(x)))).mean((2, 3)) + self.out(kernel)


class TableFromImages(nn.Module):
    """The same with the entries of an embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stem = nn.Linear(3, 8), conv_bn(3, 8)
        self.head, self.out = nn.Conv2d(8, 4, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(x.mean((0, 2, 3)))
        entries = F.embedding(torch.tensor([[0, 3]]), table.view(4, 2)).flatten(1)
        return entries + self.out(table) + self.head(F.relu(self.stem(x))).mean((2, 3))


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


class KernelMaskedInPlace(nn.Module):
    """A kernel is masked in its own memory whenever it is used (PixelCNN)."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 6), nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.register_buffer("mask", (torch.arange(9).view(3, 3) < 4).double())

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data *= self.mask
        return self.head(self.conv(self.stem(x).relu()).relu())


class StreamOfKernelsMaskedInPlace(nn.Module):
    """The channels of a stream are ranked before the later kernels are masked, weight by weight."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1)
        self.middle = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.register_buffer("seen", torch.rand(8, 8, 3, 3) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for conv in self.middle:
            with torch.no_grad():
                weight = cast(Tensor, conv.weight)
                weight[:, :, 2] = 0
                weight.mul_(self.seen)
            x = x + conv(x).relu()
        return self.head(x)


class RowsOfLengthOne(nn.Module):
    """The rows of a kernel are brought to one length whenever it is used, so a mask would not last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 6), nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conv.weight.div_(self.conv.weight.square().sum((1, 2, 3), keepdim=True).sqrt())
        return self.head(self.conv(self.stem(x).relu()).relu())


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
    """A gain for each row is multiplied into the weight, in the dtype of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = conv_bn(3, 8), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 5, 1)
        self.gain = nn.Parameter(torch.randn(6, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.to(x.dtype) * self.gain.exp().to(x.dtype)
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), weight, self.conv.bias)))


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
    """One length for the whole weight, of which every row is a part."""

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


class SpectralNorm(nn.Module):
    """A weight is divided by its largest singular value, of which buffers keep an estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(6, 5, 1)
        self.conv = spectral_norm(nn.Conv2d(8, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(F.relu(self.stem(x)))))


class SpectralNormByHook(SpectralNorm):
    """The older way: a hook computes the weight, and its power iteration runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.spectral_norm(nn.Conv2d(8, 6, 3))


class StandardisedWeight(nn.Module):
    """Mean and deviation of a row's weights are taken over its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(6, 5, 1)
        self.conv = nn.Conv2d(8, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), w.to(x.dtype), self.conv.bias)))


class ScaledStandardised(nn.Conv2d):
    """Weight standardisation by a norm, with a gain for each row (NFNet)."""

    def __init__(self, inputs: int, outputs: int, size: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2, groups=groups)
        self.gain = nn.Parameter(torch.rand(outputs, 1, 1, 1) + 0.5)

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        scale = (self.gain * rows.shape[2] ** -0.5).view(-1)
        weight = F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0)
        return F.conv2d(
            input, weight.reshape_as(self.weight), self.bias, padding=self.padding, groups=self.groups
        )


class NormFreeBlock(nn.Module):
    """A residual block of standardised convolutions: plain, grouped and depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.narrow = ScaledStandardised(3, 8, 3), ScaledStandardised(8, 4, 1)
        self.grouped, self.deep = ScaledStandardised(4, 4, 3, groups=2), ScaledStandardised(4, 4, 3, groups=4)
        self.widen, self.head = ScaledStandardised(4, 8, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.silu(self.narrow(F.silu(x)))
        return self.head(F.silu(x + 0.2 * self.widen(F.silu(self.deep(F.silu(self.grouped(y)))))))


class StandardisedBeforeGroups(nn.Module):
    """Standardised convolutions between group norms (BiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = (
            ScaledStandardised(3, 8, 3),
            ScaledStandardised(8, 8, 3),
            nn.Conv2d(8, 5, 1),
        )
        self.before, self.after = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.after(self.conv(F.relu(self.before(self.stem(x)))))))


class DrawnWeight(nn.Module):
    """A weight is drawn in every run, in eval mode, too: no value of it may be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.spread = nn.Parameter(torch.full((8, 6), -2.0))

    def forward(self, x: Tensor) -> Tensor:
        noise = F.softplus(self.spread) * torch.randn(8, 6)
        return self.head(F.relu(F.linear(x, self.hidden.weight + noise, self.hidden.bias)))


class OrthogonalWeight(nn.Module):
    """Nobody knows what becomes of a row, but the weight can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = orthogonal(nn.Linear(6, 8)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(x)))


class DiagonalOfMatrix(nn.Module):
    """A scale of channels on the diagonal of a matrix, which is square with fewer channels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("bti,ii->bti", self.stem(x), self.matrix))


class SecondDiagonal(DiagonalOfMatrix):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.pad(self.stem(x)[..., 1:] * self.matrix.diagonal(1), (0, 1)))


class WeightsOnTheLeft(nn.Module):
    """Weights multiply columns of numbers from the left, with the column itself or a bias added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8, 8))
        self.bias, self.last = nn.Parameter(torch.randn(8, 1)), nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        column = torch.addmm(self.bias, self.first, x.flatten(0, 1).t()).relu()
        return torch.inner(torch.addmm(column, self.mix, column).t(), self.last.t())


class BagOfEntries(nn.Module):
    """The mean of some entries of a table scales the channels, as in a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bag, self.head = nn.Linear(6, 8), nn.EmbeddingBag(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x) * self.bag((x[..., 0] > 0).long())[:, None])


class ComplexMatrix(nn.Module):
    """Frequencies are mixed by complex numbers (neural operators)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.matrix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.einsum("bfi,io->bfo", torch.fft.rfft(self.stem(x), dim=1), self.matrix)
        return self.head(torch.fft.irfft(waves, n=x.shape[1], dim=1))


WEIGHTS = (
    Construct(LowRankAdapter, sequences(), removed=4),
    Construct(KernelFromImages, images(), removed=3, reason="another axis of a convolution's weight"),
    Construct(TableFromImages, images(), removed=3, reason="both axes of an embedding table"),
    Construct(SumOfKernels, images(), removed=7),
    Construct(MaskedKernel, images(), removed=7),
    Construct(KernelMaskedInPlace, images(), removed=7),
    Construct(StreamOfKernelsMaskedInPlace, images(), removed=4),
    Construct(RowsOfLengthOne, images(), reason="the model writes to this parameter in eval mode, too"),
    Construct(TiedAutoencoder, sequences(), removed=4),
    Construct(CatOfWeights, sequences(), removed=12),
    Construct(HalfOfWeight, sequences(), removed=4),
    Construct(ScaledWeight, images(), removed=7),
    Construct(WeightNorm, images(), removed=7),
    Construct(WeightNormByHook, sequences(), removed=8),
    Construct(LengthOfWholeWeight, sequences(), removed=4),
    Construct(UnitRows, sequences(), removed=4),
    Construct(SafeUnitRows, sequences(), removed=4),
    Construct(OrthogonalWeight, sequences(), removed=4),
    Construct(SpectralNorm, images(), removed=7),
    Construct(SpectralNormByHook, images(), removed=7),
    Construct(StandardisedWeight, images(), removed=7),
    Construct(NormFreeBlock, images(), removed=8),
    Construct(StandardisedBeforeGroups, images(), removed=8),
    Construct(WeightFromInput, images()),
    Construct(MixedKernels, images(), removed=4),
    Construct(ParameterTables, sequences(), removed=8),
    Construct(InterpolatedPositions, images(), removed=8),
    Construct(WeightsOnTheLeft, sequences(), removed=8),
    Construct(BagOfEntries, sequences(), removed=4),
    Construct(ComplexMatrix, sequences(), removed=8),
    Construct(DiagonalOfMatrix, sequences(), removed=8),
    Construct(SecondDiagonal, sequences(), reason="mul joins these channels"),
)
