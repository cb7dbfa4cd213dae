"""Convolutions, gates, residual streams and shared weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images, sequences, signals, volumes


class ConvBnRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.head = nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x)))


class ConvBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.stem(x)))


class SigmoidBeforePaddedConv(nn.Module):
    """A dropped channel is 1/2 inside and 0 in the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.head = nn.Conv2d(8, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.stem(x)))


class SigmoidBeforeDepthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(F.softplus(self.stem(x))))


class NormWithoutAffine(nn.Module):
    """BatchNorm without weight and bias turns a masked channel into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.stem(x))))


class NormWithoutStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.stem(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.first, self.second = conv_bn(8, 8), conv_bn(8, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.second(F.relu(self.first(x))))
        return self.head(x)


class PreActivation(nn.Module):
    """The sum itself is read by BatchNorms with different shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(F.relu(self.norm(x)))
        return self.head(F.relu(self.last(x)))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 4)
        self.grow = nn.ModuleList(conv_bn(4 + 4 * i, 4) for i in range(3))
        self.norm, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.grow:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return self.head(F.relu(self.norm(x)))


class FilledAndFloored(nn.Module):
    """Pointwise operations that torch gives no tag: filled by a tensor, subtracted in reverse, floored."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv_bn(3, 8), conv_bn(8, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * x.masked_fill(x > 0.5, torch.tensor(2.0, dtype=x.dtype))
        y = F.relu(self.deep(x))
        y = torch.rsub(y, x) + y * torch.floor_divide(x.detach(), 0.5)
        return self.head(y)


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv_bn(3, 8), conv_bn(8, 8, groups=8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu6(self.deep(F.relu6(self.stem(x)))))


class DepthwiseMultiplier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = conv_bn(3, 8), conv_bn(8, 16, groups=8)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.deep(F.relu(self.stem(x)))))


class DepthwiseTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.up = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1, groups=8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.stem(x)))))


class DepthwiseTransposedMultiplier(nn.Module):
    """Of two channels with two outputs each one is left, and its weight still has no columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = conv_bn(3, 2), nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2)
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.stem(x)))))


class ScaledGroupsAndDepthwise(nn.Module):
    """Both weights are computed, and have no name by which to tell them apart once groups of one are left."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 1), nn.Conv2d(8, 5, 1)
        self.grouped, self.deep = nn.Parameter(torch.randn(8, 2, 3, 3)), nn.Parameter(torch.randn(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        mixed = F.conv2d(x, 0.5 * self.grouped, padding=1, groups=4)
        return self.last(mixed) + self.head(F.conv2d(x, 0.5 * self.deep, padding=1, groups=8))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = conv_bn(3, 16), conv_bn(16, 8, groups=4)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(F.relu(self.stem(x)))))


class TwoGroupCounts(nn.Module):
    """Channels that two groupings cut differently."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.two, self.four = conv_bn(3, 16), conv_bn(16, 16, groups=2), conv_bn(16, 16, groups=4)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.four(F.relu(self.two(F.relu(self.stem(x)))))))


class TwoGroupCountsThatDoNotDivide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.two, self.three = conv_bn(3, 12), conv_bn(12, 12, groups=2), conv_bn(12, 12, groups=3)
        self.head = nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.three(F.relu(self.two(F.relu(self.stem(x)))))))


class GroupedTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=2)
        self.head = nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.stem(x)))))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ConvTranspose2d(3, 8, 3)
        self.norm, self.head = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 5, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.stem(x))))


class OneDimension(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)
        self.up, self.head = nn.ConvTranspose1d(8, 6, 2, stride=2), nn.Conv1d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.norm(self.stem(x))))))


class ThreeDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8)
        self.up, self.head = nn.ConvTranspose3d(8, 6, 2), nn.Conv3d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.norm(self.stem(x))))))


class FunctionalConv(nn.Module):
    """Weights that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.shift = nn.Parameter(torch.randn(8))
        self.head = nn.Parameter(torch.randn(5, 8, 1, 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, self.stem, self.shift, padding=1)), self.head)


class FunctionalNorm(nn.Module):
    """BatchNorm called as a function on parameters and buffers."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("variance", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.stem(x), self.mean, self.variance, self.weight, self.bias, training=False)
        return self.head(F.relu(x))


class BlurPool(nn.Module):
    """A fixed depthwise kernel, expanded to as many channels as come."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 1)
        self.register_buffer("kernel", torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])[None, None] / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        kernel = self.kernel.expand(x.shape[1], 1, 3, 3)
        return self.head(F.conv2d(x, kernel, stride=2, padding=1, groups=x.shape[1]))


class BlurKernelBuffer(nn.Module):
    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 1)
        self.register_buffer("kernel", torch.randn(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.conv2d(F.relu(self.stem(x)), self.kernel, padding=1, groups=8))


class DepthwiseOneByOne(nn.Module):
    """A depthwise convolution of one image after the other, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.kernel = nn.Parameter(torch.randn(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.stack([F.conv2d(input=each, weight=self.kernel, groups=8) for each in x]))


class CrossCorrelation(nn.Module):
    """Each image is convolved with a kernel of its own, channel by channel (Siamese trackers)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.kernel, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 4), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        image, kernel = self.image(x), self.kernel(x)
        n, c = kernel.shape[:2]
        x = F.conv2d(image.view(1, n * c, *x.shape[2:]), kernel.view(n * c, 1, 3, 3), groups=n * c)
        return self.head(x.view(n, c, *x.shape[2:]))


def _two(channels: int, out_channels: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, padding=1, **options)


class CircularPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _two(3, 8, padding_mode="circular")
        self.mid = _two(8, 8, padding_mode="reflect")
        self.head = _two(8, 5, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(F.relu(self.stem(x)))))


class PaddingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.round = nn.Conv2d(3, 8, 3), nn.CircularPad2d(1)
        self.mid, self.mirror = nn.Conv2d(8, 8, 3), nn.ReflectionPad2d(1)
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mirror(self.mid(self.round(F.relu(self.stem(x))))))


class CircularPaddingOfChannels(nn.Module):
    """The first and the last channel are repeated at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.round, self.head = nn.Linear(6, 8), nn.CircularPad1d(1), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.round(self.stem(x)))


class LogSigmoidBeforeConv(nn.Module):
    """An activation that is never 0, by an operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.logsigmoid(self.first(x)))


class DepthwiseOnInput(nn.Module):
    """Kernels of the input's own channels; what the next layer makes of them can go."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Conv2d(3, 6, 3, groups=3)
        self.inner, self.outer = nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.each(x).relu()).relu())


class MixesTokens(nn.Module):
    """A convolution of one point whose channels are the tokens; features lie along the axis of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)
        self.mix = nn.Sequential(nn.Conv1d(5, 7, 1), nn.GELU(), nn.Conv1d(7, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.outer((hidden + self.mix(hidden)).relu())


class GatesTokens(nn.Module):
    """Half of the features, normalised and mixed over the tokens, gates the other half (gMLP)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 16), nn.LayerNorm(8), nn.Linear(8, 6)
        self.mix = nn.Conv1d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, mixed = F.gelu(self.inner(x)).chunk(2, -1)
        return x + self.outer(kept * self.mix(self.norm(mixed)))


class SweepsTime(nn.Module):
    """A kernel over time alone, without a bias: each feature has its own result."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(self.width, 6)
        self.over_time = self.kernel()

    def kernel(self) -> nn.Module:
        return nn.Conv2d(1, 4, (3, 1), padding=(1, 0), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.over_time(self.inner(x).unsqueeze(1))
        return self.outer(hidden.relu().mean((1, 2)))


class SweepsTimeBackwards(SweepsTime):
    def kernel(self) -> nn.Module:
        return nn.ConvTranspose2d(1, 4, (3, 1), stride=(2, 1), output_padding=(1, 0))


class TakesEverySecond(SweepsTime):
    """A kernel of one point that skips every second feature."""

    width = 4

    def kernel(self) -> nn.Module:
        return nn.Conv2d(1, 4, 1, stride=(1, 2))


class PadsFeatures(SweepsTime):
    """A kernel of one point whose padding adds places along the features."""

    width = 10

    def kernel(self) -> nn.Module:
        return nn.Conv2d(1, 4, 1, padding=(0, 1))


class ChannelsAsExamples(nn.Module):
    """One kernel for all channels, which are examples meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.blur, self.outer = nn.Conv2d(3, 8, 3), nn.Conv2d(1, 1, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        blurred = self.blur(x.flatten(0, 1).unsqueeze(1))
        return self.outer(blurred.view(*x.shape[:2], *blurred.shape[2:]).relu())


CONVOLUTIONS = (
    Construct(DepthwiseOneByOne, images(), removed=8, batches=False),
    Construct(ConvBnRelu, images(), removed=4),
    Construct(ConvBias, images(), removed=4),
    Construct(LogSigmoidBeforeConv, images(), removed=4),
    Construct(DepthwiseOnInput, images(), removed=4),
    Construct(SigmoidBeforePaddedConv, images(), removed=4),
    Construct(SigmoidBeforeDepthwise, images(), removed=8),
    Construct(NormWithoutAffine, images(), removed=4),
    Construct(NormWithoutStatistics, images(), removed=4),
    Construct(Residual, images(), removed=12),
    Construct(PreActivation, images(), removed=8),
    Construct(FilledAndFloored, images(), removed=8),
    Construct(DenseBlock, images(), removed=8),
    Construct(Depthwise, images(), removed=8),
    Construct(DepthwiseMultiplier, images(), removed=12),
    Construct(DepthwiseTransposed, images(), removed=8),
    Construct(DepthwiseTransposedMultiplier, images(), removed=3),
    Construct(ScaledGroupsAndDepthwise, images(), removed=12),
    Construct(Grouped, images(), removed=12),
    Construct(TwoGroupCounts, images(), removed=24),
    Construct(TwoGroupCountsThatDoNotDivide, images(), removed=18),
    Construct(GroupedTransposed, images(), removed=10),
    Construct(Transposed, images(), removed=4),
    Construct(OneDimension, signals(), removed=7),
    Construct(ThreeDimensions, volumes(), removed=7),
    Construct(FunctionalConv, images(), removed=4),
    Construct(FunctionalNorm, images(), removed=4),
    Construct(BlurPool, images(), removed=4),
    Construct(BlurKernelBuffer, images(), removed=4),
    Construct(CrossCorrelation, images(), removed=8),
    Construct(CircularPadding, images(), removed=8),
    Construct(PaddingLayers, images(), removed=8),
    Construct(MixesTokens, sequences(), removed=7),
    Construct(GatesTokens, sequences(), removed=8),
    Construct(SweepsTime, sequences(), removed=6),
    Construct(SweepsTimeBackwards, sequences(), removed=6),
    Construct(TakesEverySecond, sequences(), removed=2, reason="an axis that a convolution sweeps"),
    Construct(PadsFeatures, sequences(), removed=2, reason="an axis that a convolution sweeps"),
    Construct(ChannelsAsExamples, images(), removed=4),
    Construct(CircularPaddingOfChannels, sequences(), reason="it is written to in place through a view"),
)
