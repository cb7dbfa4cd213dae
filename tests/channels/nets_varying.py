"""What chooses channels and may choose others at the next call: inputs, weights, sizes of data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdp_fx.channels.elsewhere import ELSEWHERE
from tests.channels.construct import Construct, Inputs, conv_bn, images, sequences
from tests.channels.nets_aliasing import OVERWRITTEN

TOLD = "is told sizes or positions of these channels"


class Chooses(nn.Module):
    """A choice among the channels of one convolution, and another that shows that the rest can go."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(width, 6), nn.Conv2d(6, 5, 1)

    def after(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(x)))


class DividesByNorm(Chooses):
    """A number that is read from a tensor stays one in the graph; channels that are 0 add nothing to it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.after(y / (1 + y.norm().item()))


class ShiftsByFirst(Chooses):
    """A number that is read from one channel keeps that."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.after(y * y[0, 0].max().item())


class CutAsRead(Chooses):
    """Positions are cut as a number says that is read from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x[:, 0, 0] > 0).sum(-1).max())
        return self.after(self.stem(x)[..., : longest + 1])


class LastOfAll(Chooses):
    """The last of all numbers of an image is picked, wherever that is."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.after(y) * y.flatten(1)[:, -1].view(-1, 1, 1, 1)


class RolledAsRead(Chooses):
    """Channels are rolled as far as a number says that is read from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.stem(x).roll(int((x > 0).sum()), 1))


class OrderGiven(Chooses):
    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return self.after(self.stem(x).index_select(1, order))


class SubscriptGiven(Chooses):
    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return self.after(self.stem(x)[:, order + 0])


class KernelGiven(Chooses):
    """The model is given a kernel for each channel."""

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        return self.after(F.conv2d(self.stem(x), kernel, groups=8))


class OrderLearned(Chooses):
    """The order of scores that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.stem(x)[:, self.scores.argsort()])


class OrderComputed(Chooses):
    """The order of the channels' own means."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x[:, x.mean((0, 2, 3)).argsort()] + x)


class OrderTracked(Chooses):
    """The order of statistics that training changes."""

    scores: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.index_select(self.stem(x), 1, self.scores.argsort()))


class OrderOfTable(Chooses):
    """The order in a table: it is the same at every call."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.stem(x)[:, self.order])


class CutBySize(Chooses):
    """As many channels as the image is wide."""

    def __init__(self) -> None:
        super().__init__(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x[:, : x.shape[2]])


class NarrowedBySize(CutBySize):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x.narrow(1, 0, x.size(3)))


class SplitBySize(CutBySize):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, rest = x.split([x.shape[-1], 2], 1)
        return self.after(first + rest.mean(1, keepdim=True))


class RolledBySize(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x.roll(x.shape[2] // 2, 1))


class WritesWithGaps(Chooses):
    """Every second channel is clamped in place, at a number that the example does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).clone()
        x[:, ::2].clamp_(max=1e6)
        return self.after(x)


class WritesBehindGaps(Chooses):
    """What is read through a view with gaps is clamped in place afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        some = x[:, 1::2].mT
        x.clamp_(max=1e6)
        return self.after(torch.cat([some.mT, x[:, :4]], 1))


class PhaseOfPairs(Chooses):
    """A mask leaves -0.0 of a negative number, and the angle of that is no 0."""

    def __init__(self) -> None:
        super().__init__()
        self.other = conv_bn(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.atan2(self.stem(x), self.other(x)))


class BitsOfChannels(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x * (x.view(torch.int64) >> 63) + (x.view(torch.int32)[..., 1::2] >> 31))


class SignByPower(Chooses):
    """A negative number to a power: -1 ** x is something else in Python."""

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x * (-1.0) ** order[0] * (-2) ** x.shape[2])


class PlacesOfTable(nn.Module):
    """Relative positions by the size of the data: rows of a table that other sizes choose otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.query, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 5)
        self.table = nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        places = torch.arange(x.shape[1])
        rows = self.table[places.unsqueeze(1) - places + x.shape[1] - 1]
        scores = torch.einsum("bqc,qkc->bqk", self.query(x), rows).softmax(-1)
        return self.head(scores @ x)


class WrittenAtPlaces(PlacesOfTable):
    """Rows that the size of the data chooses are written to."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.query(x)
        y[:, torch.arange(x.shape[1] - 1)] = 0.5 * y[:, torch.arange(1, x.shape[1])]
        return self.head(x) + y.sum(2, keepdim=True)


class TokensNotTransposed(Chooses):
    """Tokens are laid out as an image without being transposed back, so that channels mix with pixels."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        return self.after(x.flatten(2).transpose(1, 2).reshape(b, c, h, w))


class PixelsNotPermuted(Chooses):
    """Pixels of all channels, last in memory, are laid out as an image by a size of -1."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, _, h, w = x.shape
        return self.after(x.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, h, w)) + x.new_zeros(b, 1, h, w))


class BatchNotTransposed(Chooses):
    """Channels are laid out as images of a batch, which another batch mixes otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, _, h, w = x.shape
        return self.after(x.transpose(0, 1).reshape(b, -1, h, w))


class OneNotTransposed(BatchNotTransposed):
    """The same, shown a single image, of which a batch axis of one index says nothing by itself."""


class RowsForImages(Chooses):
    """Rows of pixels are taken for images, as many as there are in the example."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        return self.after(x.permute(2, 1, 0, 3).reshape(b, c, h, w))


class RowsForImagesByUnflatten(Chooses):
    """The same by the function that spreads one axis."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(torch.unflatten(x.permute(2, 1, 0, 3).flatten(), 0, x.shape))


class RowsForImagesByAnother(Chooses):
    """The same by a method that takes the sizes of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.after(x.permute(2, 1, 0, 3).reshape_as(x))


class ChannelsBetweenAxes(Chooses):
    """The reshape ends in the middle of the channels, at a place that the width decides."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, _ = x.shape
        return self.after(x.permute(1, 2, 3, 0).reshape(-1, c, b, h))


class FirstOfOneImage(Chooses):
    """Channels are taken for the first axis, as they are of a single image; images have one size."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x + self.places)
        b, c, h, w = x.shape
        return self.after(x.reshape(c, h, b * w)[None])


class FirstOfOneImageWritten(Chooses):
    """The same with sizes that are written as numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.stem(x).reshape(8, 6, -1)[None])


class ColumnFirst(nn.Module):
    """The column of an image of one pixel stands where the examples seem to be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Conv2d(3, 8, 6), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.stem(x).permute(3, 1, 0, 2).reshape(-1, 8, 1, 1)
        return self.head(F.relu(self.mid(columns)))


class RowNotTransposed(nn.Module):
    """Rows are taken for signals without being transposed, which images of one row do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), nn.Conv1d(8, 6, 1), nn.Conv1d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, _, h, w = x.shape
        return self.head(F.relu(self.mid(x.reshape(b * h, -1, w))))


def of_one_row(batch: int) -> Inputs:
    """Images of one row."""
    return (torch.randn(batch, 3, 1, 6, dtype=torch.float64),)


def one_image(batch: int) -> Inputs:
    """A single image as the example, and other batches."""
    return images()(1 if batch == 2 else batch)


def with_order(batch: int) -> Inputs:
    """Images, and an order of eight channels."""
    return (*images()(batch), torch.randperm(8))


def with_kernel(batch: int) -> Inputs:
    """Images, and a kernel of one pixel for each of eight channels."""
    return (*images()(batch), torch.randn(8, 1, 1, 1, dtype=torch.float64))


VARYING = (
    Construct(KernelGiven, with_kernel, removed=3, reason="their kernels in a depthwise convolution"),
    Construct(DividesByNorm, images(), removed=7),
    Construct(ShiftsByFirst, images(), removed=6, reason="picked by its number"),
    Construct(CutAsRead, images(), removed=7),
    Construct(LastOfAll, images(), removed=6),
    Construct(RolledAsRead, images(), removed=3, reason=TOLD),
    Construct(OrderGiven, with_order, removed=3, reason=TOLD),
    Construct(SubscriptGiven, with_order, removed=3, reason=TOLD),
    Construct(OrderLearned, images(), removed=3, reason=TOLD),
    Construct(OrderComputed, images(), removed=3, reason=TOLD, batches=False),
    Construct(OrderTracked, images(), removed=3, reason=TOLD),
    Construct(OrderOfTable, images(), removed=7),
    Construct(CutBySize, images(), removed=3, reason=TOLD),
    Construct(NarrowedBySize, images(), removed=3, reason=TOLD),
    Construct(SplitBySize, images(), removed=3, reason=TOLD),
    Construct(RolledBySize, images(), removed=3, reason=TOLD),
    Construct(PhaseOfPairs, images(), removed=11),
    Construct(BitsOfChannels, images(), removed=3, reason="its bits are read as another type"),
    Construct(SignByPower, with_order, removed=7),
    Construct(WritesWithGaps, images(), removed=3, reason=OVERWRITTEN),
    Construct(WritesBehindGaps, images(), removed=3, reason=OVERWRITTEN),
    Construct(PlacesOfTable, sequences(), removed=7),
    Construct(WrittenAtPlaces, sequences(), removed=7),
    Construct(TokensNotTransposed, images(3, 2), removed=3, reason=TOLD),
    Construct(PixelsNotPermuted, images(3, 2), removed=3, reason=TOLD),
    Construct(BatchNotTransposed, images(), removed=3, reason=TOLD),
    Construct(RowsForImages, images(3, 2), removed=3, reason=ELSEWHERE),
    Construct(RowsForImagesByUnflatten, images(3, 2), removed=3, reason=ELSEWHERE),
    Construct(RowsForImagesByAnother, images(3, 2), removed=3, reason=ELSEWHERE),
    Construct(ChannelsBetweenAxes, images(3, 2), removed=3, reason=TOLD),
    Construct(OneNotTransposed, one_image, removed=3, reason=TOLD),
    Construct(FirstOfOneImage, one_image, removed=3),
    Construct(FirstOfOneImageWritten, one_image, removed=3),
    Construct(ColumnFirst, one_image, removed=3),
    Construct(RowNotTransposed, of_one_row, removed=3),
)
