"""Channels that must stay, and why; what is beside them can go."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images, sequences, signals


class Between(nn.Module):
    """Something between two convolutions, and a third that shows that the rest is not given up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(self.act(F.relu(self.stem(x))))))

    def act(self, x: Tensor) -> Tensor:
        return x


class Dropped(nn.Module):
    """Leaves its layer out at random while it trains, by a normal number of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        drawn = np.random.normal()
        return x if self.training and drawn < -9 else x + self.conv(x)


class DroppedByNumPy(Between):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Dropped()

    def act(self, x: Tensor) -> Tensor:
        return self.layer(x)


class SoftmaxOverChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return x.softmax(1)


class LogarithmOfChannels(Between):
    """Of a channel that is 0 nothing finite is left, on which a mask would do nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(self.stem(x).abs().log())))


class RootMeanSquare(Between):
    """The gradient of a root is infinite at 0, so a mask has to be behind it."""

    def act(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean((2, 3), keepdim=True).sqrt()


class SignedRoot(Between):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.mid(torch.where(x > 0, 1.0, -1.0) * x.abs().sqrt())))


class LengthsOfVectors(Between):
    """A channel is the length of a vector of two."""

    def act(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (4, 2)).pow(2).sum(2).sqrt()
        return torch.cat([parts, parts.add(1e-3).sqrt()], 1)


class RootBesideProduct(Between):
    """What is behind a root is also multiplied with itself, where dropped channels have to be 0."""

    def act(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        alike = (tokens.mT @ tokens).softmax(-1)
        return x.square().sqrt() + (tokens @ alike).view(x.shape)


class GreatestOfTwo(Between):
    """The greatest of numbers that are 0 is 0, by either spelling."""

    def act(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, 2 * x], -1).max(-1)[0].flatten(2)
        return (tokens @ (tokens.mT @ tokens).softmax(-1)).view(x.shape)


class PlacesAreCounted(Between):
    """Where the greatest numbers of a channel are is not 0 where the numbers are."""

    def act(self, x: Tensor) -> Tensor:
        places = F.max_pool2d(x, 2, return_indices=True)[1]
        return x * torch.tanh(places.sum(dtype=x.dtype))


class NormOverTwoAxes(Between):
    def act(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.flatten(2).mT, (x[0, 0].numel(), 8)).mT.unflatten(2, x.shape[2:])


class CopiesByTensor(Between):
    copies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copies", torch.full((8,), 1))

    def act(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.copies, 1)


class ReturnsWidth(Between):
    """How many channels there are is returned, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.mid(x))), x.shape[1]


class LocalResponseNorm(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LocalResponseNorm(3)

    def act(self, x: Tensor) -> Tensor:
        return self.norm(x)


class GroupNorm(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))


class GroupNormBeforeGrouped(Between):
    """Two groups in the norm, four in the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.grouped = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1, groups=4)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(self.grouped(self.norm(x)))


class InstanceNorm(Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def act(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))


class LayerNormOfImage(Between):
    """ConvNeXt's norm: over the channels of every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def act(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class RmsNormStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 5)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.down(F.silu(self.up(self.norm(x)))))


class RmsNormByHand(RmsNormStream):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        return self.head(x + self.down(F.silu(self.up(y))))


class DataDependentIf(Between):
    def act(self, x: Tensor) -> Tensor:
        if x.mean() > 0.1:
            return x * 2
        return x


class DataDependentMethod(Between):
    """A method decides which of the model's own layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def act(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 0 else self.right(x)


class OpaqueWithWeights(nn.Module):
    """A submodule that branches on its data; it has layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().mean()) > 0 else x


class DataDependentIfInside(Between):
    def __init__(self) -> None:
        super().__init__()
        self.branch = OpaqueWithWeights()

    def act(self, x: Tensor) -> Tensor:
        return self.branch(x)


class TwoWays(nn.Module):
    """Only one of two layers runs, as a sum over all channels says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if float(x.detach().sum()) > 0 else self.right(x)


class DataDependentChoice(DataDependentIfInside):
    """What one run of it shows does not hold for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = TwoWays()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(self.branch(self.stem(x)))))


class Undecided(nn.Module):
    """Passes its input on unless the input is large, and draws nothing in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.1:
            return x * 0
        return x if x.amax() < 1e6 else x.flip(1)


class UndecidedModule(Between):
    """What passes on what it is given, on the example, is no proof that it always does."""

    def __init__(self) -> None:
        super().__init__()
        self.undecided = Undecided()

    def act(self, x: Tensor) -> Tensor:
        return self.undecided(x)


class MeanOverChannels(Between):
    """Spatial attention: the mean over channels divides by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(2, 1, 3, padding=1)

    def act(self, x: Tensor) -> Tensor:
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.spatial(both))


class ConvOverChannels(Between):
    """ECA: a convolution along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(1, 1, 3, padding=1)

    def act(self, x: Tensor) -> Tensor:
        gate = self.along(x.mean((2, 3)).unsqueeze(1)).squeeze(1)
        return x * torch.sigmoid(gate)[:, :, None, None]


class CumsumOverChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class SortedChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return x.sort(dim=1).values


class TopChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return x * (x >= x.topk(3, dim=1).values.amin(1, keepdim=True))


class VarianceOverChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return x / (torch.var_mean(x, 1, keepdim=True)[0] + 1)


class FourierChannels(Between):
    def act(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1).abs()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


class WrittenInPlace(Between):
    """Some channels are written through a view."""

    def act(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :3] += 1
        return x


class TemporalShift(Between):
    """Channels move to the neighbouring frame: slices of an empty tensor are filled."""

    def act(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :2, 1:] = x[:, :2, :-1]
        out[:, 2:] = x[:, 2:]
        return out


class AddedToInput(nn.Module):
    """A sum with the input can never vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = conv_bn(3, 3), conv_bn(3, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.last(x + self.stem(x))))


class DrawsLike(Between):
    """Draws a number for each channel in eval mode, too, as dropout does that is never switched off.

    Here and below whatever is drawn keeps everything, so that outputs can be compared.
    """

    def act(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 2)


class DrawsTruths(Between):
    def act(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.ones_like(x))


class DrawsInPlace(Between):
    def act(self, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).uniform_(0, 1e-300)


class DrawsSlopes(Between):
    def act(self, x: Tensor) -> Tensor:
        return F.rrelu(x, 0.1, 0.1, training=True)


class ReturnsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features = F.relu(self.stem(x))
        return self.head(F.relu(self.mid(features))), {"features": features}


class EnlargesGreyImages(nn.Module):
    """All channels of the last layer become the pixels of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.head(F.relu(self.stem(x))), 2)


class FoldsIntoOne(EnlargesGreyImages):
    def forward(self, x: Tensor) -> Tensor:
        sizes = (2 * x.shape[2], 2 * x.shape[3])
        return F.fold(self.head(F.relu(self.stem(x))).flatten(2), sizes, 2, stride=2)


class GatedIntoOne(EnlargesGreyImages):
    def forward(self, x: Tensor) -> Tensor:
        return F.glu(F.glu(self.head(F.relu(self.stem(x))), 1), 1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn = nn.Linear(6, 8), nn.LSTM(8, 4, batch_first=True)
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(F.relu(self.stem(x)))
        return self.head(F.relu(self.hidden(y)))


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn = nn.Linear(6, 8), nn.GRU(8, 4, num_layers=2, bidirectional=True)
        self.hidden, self.head = nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(F.relu(self.stem(x)).transpose(0, 1))
        return self.head(F.relu(self.hidden(y)).mean(0))


class BilinearLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 4)
        self.both, self.head = nn.Bilinear(8, 4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.both(F.relu(self.left(x)), F.relu(self.right(x)))))


class ChannelAttention(nn.Module):
    """XCiT: channels attend to channels."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x).mT, self.k(x).mT, self.v(x).mT
        y = ((q @ k.mT).softmax(-1) @ v).mT
        return self.head(F.relu(self.hidden(x + self.out(y))))


class Unfolded(nn.Module):
    """im2col by hand: every channel becomes nine columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = conv_bn(3, 8), nn.Linear(72, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(F.relu(self.stem(x)), 3, padding=1).transpose(1, 2)
        return self.head(F.relu(self.mix(patches)))


@dataclass
class Found:
    """What a model returns: one tensor, and sometimes another."""

    logits: Tensor
    hidden: Tensor | None = None


class ReturnedInRecord(nn.Module):
    """Hidden channels that the model returns in an object, which hides them from other eyes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Found:
        x = F.relu(self.stem(x))
        return Found(self.head(F.relu(self.mid(x))), x)


class Holder:
    """An object that is no dataclass."""

    def __init__(self, hidden: Tensor) -> None:
        self.parts = {"hidden": hidden}


class ReturnedInObject(ReturnedInRecord):
    def forward(self, x: Tensor) -> tuple[Tensor, Holder]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.mid(x))), Holder(x)


class LearnedSoftmaxPool(nn.Module):
    """Positions, not channels, compete: nothing is in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.score, self.head = nn.Conv1d(3, 8, 3), nn.Conv1d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.stem(x) * self.score(x).softmax(-1)).sum(-1))


class ChooseEntries(Between):
    """An entry is chosen by a channel that is 0, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def act(self, x: Tensor) -> Tensor:
        chosen = self.table(x.long().clamp(0, 4)).sum((1, 2, 3))
        return x * chosen.sigmoid()[..., None, None]


class RepeatedKernel(Between):
    """A kernel of ones is repeated for so many channels; a norm reads them, too."""

    def act(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, 4)
        return F.conv_transpose2d(x, x.new_ones(1, 1, 2, 2).repeat(8, 1, 1, 1), groups=8, stride=2)


REFUSALS = (
    Construct(RepeatedKernel, images(), removed=7),
    Construct(RootMeanSquare, images(), removed=7),
    Construct(SignedRoot, images(), removed=7),
    Construct(LengthsOfVectors, images(), removed=7),
    Construct(RootBesideProduct, images(), removed=3, reason="no finite gradient where a mask"),
    Construct(GreatestOfTwo, images(), removed=7),
    Construct(ChooseEntries, images(), removed=3, reason="these values choose"),
    Construct(SoftmaxOverChannels, images(), removed=3, reason="softmax runs over these channels"),
    Construct(LocalResponseNorm, images(), removed=3, reason="over these channels"),
    Construct(GroupNorm, images(), removed=7),
    Construct(GroupNormBeforeGrouped, images(), removed=11),
    Construct(InstanceNorm, images(), removed=7),
    Construct(LayerNormOfImage, images(), removed=7),
    Construct(RmsNormStream, sequences(), removed=8, reason="runs over these channels"),
    Construct(RmsNormByHand, sequences(), removed=8, reason="mean runs over these channels"),
    Construct(UndecidedModule, images(), removed=3, reason="Undecided decides by its data"),
    Construct(DataDependentIf, images(), removed=3, reason="data"),
    Construct(DataDependentMethod, images(), removed=3, reason="data"),
    Construct(DataDependentIfInside, images(), removed=3, reason="data"),
    Construct(DataDependentChoice, images(), removed=3, reason="data"),
    Construct(MeanOverChannels, images(), removed=3, reason="amax runs over these channels"),
    Construct(ConvOverChannels, images(), removed=3, reason="convolution sweeps"),
    Construct(CumsumOverChannels, images(), removed=3, reason="cumsum runs over these channels"),
    Construct(SortedChannels, images(), removed=3, reason="sort runs over these channels"),
    Construct(TopChannels, images(), removed=3, reason="topk runs over these channels"),
    Construct(VarianceOverChannels, images(), removed=3, reason="var_mean runs over these channels"),
    Construct(FourierChannels, images(), removed=3, reason="fft_r2c runs over these channels"),
    Construct(WrittenInPlace, images(), removed=7),
    Construct(TemporalShift, images(), removed=7),
    Construct(
        AddedToInput, images(), removed=4, reason="add joins these channels with values that have none"
    ),
    Construct(DrawsLike, images(), removed=3, reason="random numbers are drawn here"),
    Construct(DrawsTruths, images(), removed=3, reason="random numbers are drawn here"),
    Construct(DrawsInPlace, images(), removed=3, reason="random numbers are drawn here"),
    Construct(DrawsSlopes, images(), removed=3, reason="random numbers are drawn here"),
    Construct(ReturnsFeatures, images(), removed=3, reason="the model returns these channels"),
    Construct(ReturnsWidth, images(), removed=3, reason="the model returns how many of these channels"),
    Construct(LogarithmOfChannels, images(), removed=3, reason="log of 0 is no finite number"),
    Construct(PlacesAreCounted, images(), removed=3, reason="a dropped channel is not 0"),
    Construct(NormOverTwoAxes, images(), removed=3, reason="mean runs over these channels"),
    Construct(CopiesByTensor, images(), removed=3, reason="repeat_interleave is told sizes"),
    Construct(DroppedByNumPy, images(), removed=3, reason="draw them by torch, as in torch.rand([])"),
    Construct(EnlargesGreyImages, images(), removed=4, reason="together are one"),
    Construct(FoldsIntoOne, images(), removed=4, reason="together are one"),
    Construct(GatedIntoOne, images(), removed=4, reason="together are one"),
    Construct(Lstm, sequences(), removed=9),
    Construct(Gru, sequences(), removed=9),
    Construct(BilinearLayer, sequences(), reason="no channel rule for _trilinear"),
    Construct(ChannelAttention, sequences(), removed=4, reason="softmax runs over these channels"),
    Construct(Unfolded, images(), removed=7),
    Construct(ReturnedInRecord, sequences(), removed=6, reason="the model returns these channels"),
    Construct(ReturnedInObject, sequences(), removed=6, reason="the model returns these channels"),
    Construct(LearnedSoftmaxPool, signals(), removed=8),
)
