"""Norms whose statistics run over channels: with masked statistics even those channels can go."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images, sequences, signals
from tests.channels.nets_refusals import RmsNormByHand, RmsNormStream


class ThroughRmsNorm(RmsNormStream):
    pass


class ThroughRmsNormByHand(RmsNormByHand):
    pass


class TransformerBlock(nn.Module):
    """A residual stream that norms read, and that a table and positions start (GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.first, self.second, self.last = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8, eps=1e-3)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.places
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, 2, -1).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        weight = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        x = x + self.out((weight @ v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return self.head(self.last(x))


class GroupNormResidual(nn.Module):
    """A stream under GroupNorms of two group counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 5, 1),
        )
        self.first, self.last = nn.GroupNorm(2, 16), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.inner(F.relu(self.first(x)))
        return self.head(F.relu(self.last(x)))


class GroupNormOfHeads(nn.Module):
    """A norm of its own for each head (RetNet, RWKV): heads go with their groups."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, width) for width in (8, 8, 16))
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Linear(16, 5)

    def normed(self, y: Tensor, heads: int) -> Tensor:
        return self.norm(y)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = (q @ k.transpose(-2, -1) @ v).transpose(1, 2)
        y = self.normed(y.reshape(b * t, -1), y.shape[2])
        return self.out(y.view(b, t, -1))


class GroupNormOfHeadsAsFunction(GroupNormOfHeads):
    def normed(self, y: Tensor, heads: int) -> Tensor:
        y = F.group_norm(y, 4, self.norm.weight, self.norm.bias)
        return F.group_norm(y, num_groups=4)


class GroupNormOfCountedHeads(GroupNormOfHeads):
    """The number of groups is the number of heads that are there."""

    def normed(self, y: Tensor, heads: int) -> Tensor:
        return torch.group_norm(y, heads, self.norm.weight, self.norm.bias)


class GroupNormOfHeadsTwice(GroupNormOfHeads):
    def normed(self, y: Tensor, heads: int) -> Tensor:
        return self.norm(F.silu(self.norm(y)))


class GroupNormOfSingles(nn.Module):
    """A group for each channel (Wav2Vec2): a norm over time, which channels can leave."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv1d(3, 8, 3), nn.Conv1d(8, 8, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(8, 8, affine=affine), nn.GroupNorm(8, 8, affine=affine)
        self.head = nn.Conv1d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.stem(x)))
        return self.head(F.gelu(self.last(self.inner(x))))


class GroupNormOfSinglesWithoutAffine(GroupNormOfSingles):
    def __init__(self) -> None:
        super().__init__(affine=False)


class NormOfJoined(nn.Module):
    """One norm over two layers' channels side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 4)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(torch.cat([self.left(x), self.right(x)], -1))))


class NormWithInput(nn.Module):
    """The norm runs over channels that can go and over the input's, which cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(14), nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.cat([self.left(x), x], -1)))


class NormWithoutAffineParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = (
            nn.Linear(6, 8),
            nn.LayerNorm(8, elementwise_affine=False),
            nn.Linear(8, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(F.relu(self.stem(x)))))


class FunctionalLayerNorm(nn.Module):
    """The number of channels is written into the call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.layer_norm(self.stem(x), (8,), self.weight, self.bias))


class NormOfTwoAxes(nn.Module):
    """Channels and pixels are normed together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 4, 4]), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)))


class SharedNorm(nn.Module):
    """One norm for two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(6, 8), nn.Linear(6, 8), nn.LayerNorm(8)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(self.left(x)), F.relu(self.norm(self.right(x)))], -1))


class SharedBareNorm(SharedNorm):
    """One norm without a weight for two streams, and for an input, whose channels stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(torch.cat([x, x[..., :2]], -1))
        return super().forward(x) + seen[..., :5]


class NormInsideBlock(nn.Module):
    """The norm of a hidden layer is masked, the norm of the stream keeps its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.gate, self.down = (
            nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8),
        )  # fmt: skip
        self.outer, self.inner, self.head = nn.LayerNorm(8), nn.LayerNorm(12), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        read = self.outer(x)
        x = x + self.down(self.inner(self.up(read) * F.silu(self.gate(read))))
        return self.head(x)


class GlobalResponseNorm(nn.Module):
    """A hidden layer whose channels are scaled by their share of the mean response (ConvNeXt V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = nn.Conv2d(3, 8, 3), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.shift = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        hidden = F.gelu(self.up(F.layer_norm(x, (8,))))
        response = torch.linalg.vector_norm(hidden, dim=(1, 2), keepdim=True)
        share = response / (response.mean(dim=-1, keepdim=True) + 1e-6)
        x = x + self.down(self.scale * (hidden * share) + self.shift + hidden)
        return self.head(x.mean((1, 2)))


class MeanOfEverything(nn.Module):
    """A penalty on what a hidden layer gives, returned beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(self.stem(x))
        return self.head(x), x.square().mean(), torch.mean(x, dtype=torch.float64)


class LossBetweenHiddenMaps(nn.Module):
    """Losses between hidden maps, by functions and modules, given beside the result (distillation)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twin, self.head = conv_bn(3, 8), conv_bn(3, 8), nn.Conv2d(8, 5, 1)
        self.far = nn.ModuleList(
            [nn.MSELoss(), nn.SmoothL1Loss(beta=0.3), nn.HuberLoss(reduction="sum"), nn.L1Loss()]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, y = F.relu(self.stem(x)), F.relu(self.twin(x))
        near = F.huber_loss(x, y.detach(), "mean", 0.2), F.mse_loss(x.flatten(2), y.flatten(2))
        pooled = F.smooth_l1_loss(x.mean((2, 3)), y.mean((2, 3)), None, None, "mean", 0.1)
        each = F.mse_loss(x, y, reduction="none").sum(1)
        return self.head(x * y), pooled, each, *near, *(far(x, y) for far in self.far)


class VectorQuantizer(nn.Module):
    """Each pixel becomes the nearest code; what lies between is a loss (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.codes = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Embedding(6, 8)
        self.up, self.head = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down(F.relu(self.stem(x))).permute(0, 2, 3, 1)
        nearest = torch.cdist(x.flatten(0, 2), self.codes.weight).argmin(1)
        y = self.codes(nearest).view(x.shape)
        loss = F.mse_loss(y, x.detach()) + 0.25 * F.mse_loss(y.detach(), x)
        y = x + (y - x).detach()
        return self.head(F.relu(self.up(y.permute(0, 3, 1, 2)))), loss


class ThroughVectorQuantizer(VectorQuantizer):
    pass


class LossOfPairs(nn.Module):
    """A loss over how much any two channels have in common, which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twin, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.stem(x), self.twin(x)
        return self.head(x * y), F.mse_loss(x.mT @ x, y.mT @ y)


class MeanOfFlattened(nn.Module):
    """An image less the mean over one axis of the batch, the channels and the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = conv_bn(3, 8), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.inner(x - x.flatten().mean())))


class MeanOfBatch(nn.Module):
    """Tokens less the mean over one axis of the batch, the tokens and the channels, which come last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.inner(x - x.view(-1).mean())))


class Straight(torch.autograd.Function):
    """Rounds, and has the gradient of something that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.mul(4).round().div(4)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


class AutogradFunction(nn.Module):
    """A user's own function with its own derivative, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(cast(Tensor, Straight.apply(x)) if self.training else x.mul(4).round().div(4))


class AutogradFunctionAlways(AutogradFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(cast(Tensor, Straight.apply(self.stem(x))))


class Reversed(torch.autograd.Function):
    """Gives a view of all of it, so that autograd sees something new, and reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -ctx.strength * gradient, None


class AutogradFunctionViews(AutogradFunction):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(cast(Tensor, Reversed.apply(self.stem(x), 0.3)))


class MeanByNumpysNames(nn.Module):
    """A mean over channels, told its axis by the name that NumPy has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x - cast(Any, x).mean(axis=-1)[..., None]
        return self.head(x * cast(Any, torch).mean(x, axis=(-1,), keepdims=True))


class MeanWithoutOut(MeanByNumpysNames):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x - torch.mean(x, dim=-1, keepdim=True, out=None))


class NormsOfTorch(nn.Module):
    """Functions of torch that are told, besides, whether to use cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.scale, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.layer_norm(self.stem(x), (8,), self.scale, self.shift, 1e-3, False)
        x = torch.layer_norm(x, (8,), weight=self.scale, bias=self.shift, cudnn_enable=False)
        return self.head(x)


class GroupNormOfTorch(NormsOfTorch):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.group_norm(self.stem(x).flatten(0, 1), 2, self.scale, self.shift, 1e-3, True)
        x = torch.group_norm(x, 2, weight=self.scale, bias=self.shift, cudnn_enabled=False)
        return self.head(x)


class AxesOfNumbers(nn.Module):
    """Single numbers, which are taken to have one axis by what goes along an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.scales, self.first = nn.Parameter(torch.rand(3)), nn.Buffer(torch.tensor([0]))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.scales[0], self.scales[1].softmax(-1), self.scales[2].sum(-1)
        x = self.stem(x) * one.cumsum(0) * two * three.sort(-1)[0]
        return self.head(x * one.index_select(0, self.first) * x.square().mean().amax(0))


class NormOfStd(nn.Module):
    """Layer normalisation by hand: mean and standard deviation of the last axis, scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def normed(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.normed(self.stem(x)) * self.scale + self.shift)


class NormOfBiasedVar(NormOfStd):
    def normed(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, False, True) + 1e-3)


class NormOfVarOfAll(NormOfStd):
    """Over all positions, too, as global layer normalisation does."""

    def normed(self, x: Tensor) -> Tensor:
        centred = x - x.mean((1, 2), keepdim=True)
        return centred / torch.sqrt(torch.var(x, (1, 2), correction=0, keepdim=True) + 1e-3)


class NormOfStdOfBatch(NormOfStd):
    """A single number for the whole batch."""

    def normed(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / (torch.std(x, False) + torch.std(x))


class StdOfPairs(NormOfStd):
    """An axis of pairs of channels: where one of them goes, both go."""

    def normed(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (4, 2))
        return (pairs / (1 + pairs.std(-1, keepdim=True))).flatten(-2)


class NormOfPixels(nn.Module):
    """A norm runs over pixels and adds a bias without a weight: channels of zeros do not stay zeros."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 5, 1)
        self.bias = nn.Parameter(torch.randn(8))
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("variance", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(F.relu(self.stem(x))))

    def act(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), None, self.bias)


class GroupNormScaledTogether(NormOfPixels):
    """What scales channels is a softmax over them."""

    def act(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 1, self.scale.softmax(0), self.shift)


class BatchNormScaledTogether(NormOfPixels):
    """What shifts channels is a running sum over them."""

    def act(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.scale, self.shift.cumsum(0))


NORMS = (
    Construct(NormOfPixels, signals(), removed=4),
    Construct(GroupNormScaledTogether, signals(), reason="scales or shifts", through_norms=True),
    Construct(BatchNormScaledTogether, signals(), reason="scales or shifts"),
    Construct(NormOfStd, sequences(), removed=4),
    Construct(NormOfBiasedVar, sequences(), removed=4),
    Construct(NormOfVarOfAll, sequences(), removed=4),
    Construct(NormOfStdOfBatch, sequences(), removed=4),
    Construct(StdOfPairs, sequences(), removed=4),
    Construct(MeanByNumpysNames, sequences(), removed=4),
    Construct(MeanWithoutOut, sequences(), removed=4),
    Construct(NormsOfTorch, sequences(), removed=4),
    Construct(GroupNormOfTorch, sequences(), removed=4),
    Construct(AxesOfNumbers, sequences(), removed=4),
    Construct(MeanOfEverything, sequences(), removed=4),
    Construct(LossBetweenHiddenMaps, images(), removed=4),
    Construct(VectorQuantizer, images(), removed=8, reason="mean runs over these channels"),
    Construct(ThroughVectorQuantizer, images(), removed=12, through_norms=True),
    Construct(LossOfPairs, sequences(), reason="mean runs over"),
    Construct(MeanOfFlattened, images(), removed=3, reason="before and behind them is on the same axis"),
    Construct(MeanOfBatch, sequences(), removed=3, reason="a batch, are on the same axis"),
    Construct(AutogradFunction, sequences(), removed=4),
    Construct(AutogradFunctionAlways, sequences(), removed=4),
    Construct(AutogradFunctionViews, sequences(), removed=4),
    Construct(NormInsideBlock, sequences(), removed=12, reason="statistics of layer_norm"),
    Construct(GlobalResponseNorm, images(), removed=6, reason="statistics of layer_norm"),
    Construct(ThroughRmsNorm, sequences(), removed=16, through_norms=True),
    Construct(ThroughRmsNormByHand, sequences(), removed=16, through_norms=True),
    Construct(TransformerBlock, sequences(), removed=32, through_norms=True),
    Construct(GroupNormResidual, images(), removed=16, through_norms=True),
    Construct(GroupNormOfHeads, sequences(), removed=16),
    Construct(GroupNormOfHeadsAsFunction, sequences(), removed=16),
    Construct(GroupNormOfCountedHeads, sequences(), removed=16),
    Construct(GroupNormOfHeadsTwice, sequences(), removed=16),
    Construct(GroupNormOfSingles, signals(), removed=8),
    Construct(GroupNormOfSinglesWithoutAffine, signals(), removed=8),
    Construct(NormOfJoined, sequences(), removed=6),
    Construct(NormWithInput, sequences(), removed=4),
    Construct(NormWithoutAffineParts, sequences(), removed=4),
    Construct(FunctionalLayerNorm, sequences(), removed=4),
    Construct(NormOfTwoAxes, images(), reason="statistics of layer_norm"),
    Construct(SharedNorm, sequences(), removed=8),
    Construct(SharedBareNorm, sequences(), removed=8),
)
