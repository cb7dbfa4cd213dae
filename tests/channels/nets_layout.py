"""Operations that move channels about: split, join, shuffle, reshape, index."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images


class Wide(nn.Module):
    """A stem of 16 channels, something that moves them, and a head that reads them."""

    reads = 16

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 16), nn.Conv2d(self.reads, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.move(F.relu(self.stem(x))))

    def move(self, x: Tensor) -> Tensor:
        return x


class Chunk(Wide):
    reads = 8

    def move(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return left * torch.sigmoid(right)


class ChunkJoined(Wide):
    def move(self, x: Tensor) -> Tensor:
        first, second, third, fourth = x.chunk(4, dim=1)
        return torch.cat([third, first + 1, fourth, second], 1)


class ChunkUneven(Wide):
    """16 channels in 3 chunks: 6, 6 and 4."""

    reads = 10

    def move(self, x: Tensor) -> Tensor:
        first, second, third = x.chunk(3, dim=1)
        return torch.cat([first - second, third], 1)


class SplitUnequal(Wide):
    def move(self, x: Tensor) -> Tensor:
        small, large = torch.split(x, [4, 12], dim=1)
        return torch.cat([large, F.max_pool2d(small, 3, 1, 1)], 1)


class SplitEmptied(SplitUnequal):
    """The weakest channels are all those of one part, which pooling does not take empty."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.stem.get_parameter("0.weight")[:4] *= 1e-3


class SplitByHalfOfShape(Wide):
    def move(self, x: Tensor) -> Tensor:
        left, right = torch.split(x, x.shape[1] // 2, dim=1)
        return torch.cat([left.neg(), right], 1)


class SliceByShape(Wide):
    """Positions computed from the width: after pruning, half of it lies elsewhere."""

    def move(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], 2 * x[:, :half]], 1)


class SliceConstant(Wide):
    reads = 10

    def move(self, x: Tensor) -> Tensor:
        return x[:, 3:13]


class SliceStrided(Wide):
    reads = 8

    def move(self, x: Tensor) -> Tensor:
        return x[:, 0::2] + x[:, 1::2]


class SliceResidual(Wide):
    """Only some channels get something added."""

    def __init__(self) -> None:
        super().__init__()
        self.part = conv_bn(6, 6)

    def move(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :6] + self.part(x[:, :6]), x[:, 6:]], 1)


class UnbindChannels(Wide):
    reads = 4

    def move(self, x: Tensor) -> Tensor:
        return torch.stack(x.unbind(1)[2:6], 1)


class Glu(Wide):
    reads = 8

    def move(self, x: Tensor) -> Tensor:
        return F.glu(x, dim=1)


class PixelShuffle(Wide):
    reads = 4

    def move(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, 2)


class PixelUnshuffle(Wide):
    reads = 64

    def move(self, x: Tensor) -> Tensor:
        return F.pixel_unshuffle(x, 2)


class SpaceToDepth(Wide):
    """Pixel unshuffle written with view and permute."""

    reads = 64

    def move(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(b, c * 4, h // 2, w // 2)


class PatchMerging(Wide):
    """Neighbouring pixels become channels, by slices (Swin)."""

    reads = 64

    def move(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return x.permute(0, 3, 1, 2)


class ChannelShuffle(Wide):
    def move(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 4, c // 4, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


class ChannelShuffleModule(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.shuffle = nn.ChannelShuffle(2)

    def move(self, x: Tensor) -> Tensor:
        return self.shuffle(x)


class ChannelShuffleConstant(Wide):
    def move(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, 8, 6, 6).transpose(1, 2).reshape(-1, 16, 6, 6)


class GroupedShuffleGrouped(Wide):
    """A grouped convolution, a shuffle, and another grouped convolution (ShuffleNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_bn(16, 16, 1, groups=2), conv_bn(16, 16, groups=2)

    def move(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        b, c, h, w = x.shape
        return self.second(x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w))


class ShuffleUnit(Wide):
    """Half of the channels pass by, all are shuffled (ShuffleNet version 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv_bn(8, 8, 1), nn.ReLU(), conv_bn(8, 8, groups=8), conv_bn(8, 8, 1))
        self.shuffle = nn.ChannelShuffle(2)

    def move(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        return self.shuffle(torch.cat([left, F.relu(self.branch(right))], 1))


class Repeat(Wide):
    reads = 32

    def move(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2, 1, 1)


class RepeatInterleave(Wide):
    reads = 48

    def move(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(3, dim=1)


class RepeatShortcut(Wide):
    """Channels are repeated so that they can be added to wider ones."""

    reads = 32

    def __init__(self) -> None:
        super().__init__()
        self.wide = conv_bn(16, 32)

    def move(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(x) + x.repeat(1, 2, 1, 1))


class ZeroPadShortcut(Wide):
    """The shortcut gets channels of zeros on both sides (ResNet option A)."""

    reads = 24

    def __init__(self) -> None:
        super().__init__()
        self.wide = conv_bn(16, 24)

    def move(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(x) + F.pad(x, (0, 0, 0, 0, 4, 4)))


class ZerosJoinedShortcut(Wide):
    reads = 24

    def __init__(self) -> None:
        super().__init__()
        self.wide = conv_bn(16, 24)

    def move(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x[:, :8])
        return F.relu(self.wide(x) + torch.cat([x, zeros], 1))


class PadByOne(Wide):
    """Channels padded with a value that is not 0."""

    reads = 18

    def move(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 1, 1), value=0.5)


class Cropped(Wide):
    """Padding with negative widths crops channels, here on one side and then on both."""

    reads = 12

    def move(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 0, 0, -6, 2))
        return F.pad(x, (0, 0, 0, 0, -2, -2)) + shifted


class IndexSelect(Wide):
    reads = 7
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([3, 0, 15, 8, 8, 1, 12]))

    def move(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.order)


class IndexByBuffer(Wide):
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(16))

    def move(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class IndexByList(Wide):
    reads = 5

    def move(self, x: Tensor) -> Tensor:
        return x[:, [1, 14, 2, 9, 9]]


class RowsByIndexOfTwoAxes(Wide):
    """Places laid out along two axes come behind the channels, of which nothing is picked."""

    def move(self, x: Tensor) -> Tensor:
        return x[:, :, torch.tensor([[0, 1], [3, 2]])].flatten(2, 3)


class ChannelsByIndexOfTwoAxes(Wide):
    def move(self, x: Tensor) -> Tensor:
        return x[:, torch.arange(15, -1, -1).view(2, 8)].flatten(1, 2)


class GapsBesideList(Wide):
    """Two lists would be read as pairs, so that the slice that leaves gaps cannot become one."""

    reads = 8

    def move(self, x: Tensor) -> Tensor:
        return x[:, ::2, [0, 3, 1]]


class GapsBehindMask(Wide):
    """A mask of two axes: what comes behind it is another axis than it seems."""

    reads = 8

    def move(self, x: Tensor) -> Tensor:
        pixels = torch.arange(36).view(6, 6) % 2 == 0
        return x.permute(0, 2, 3, 1)[:, pixels, ::2].mT.unflatten(2, (3, 6))


class PixelsByMask(Wide):
    """A mask of two axes picks pixels of channels that lie behind it."""

    def move(self, x: Tensor) -> Tensor:
        pixels = torch.arange(36).view(6, 6) % 2 == 0
        return x.permute(0, 2, 3, 1)[:, pixels, :].mT.unflatten(2, (3, 6))


class Roll(Wide):
    def move(self, x: Tensor) -> Tensor:
        return torch.roll(x, 3, 1)


class RollAdded(Wide):
    """A channel, its neighbour, the neighbour's neighbour: all are one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = conv_bn(16, 16)

    def move(self, x: Tensor) -> Tensor:
        return F.relu(self.last(x + torch.roll(x, 1, 1)))


class Flip(Wide):
    def move(self, x: Tensor) -> Tensor:
        return x.flip(1)


class FlipAdded(Wide):
    def move(self, x: Tensor) -> Tensor:
        return x + torch.flip(x, [1])


class Stack(Wide):
    reads = 32

    def __init__(self) -> None:
        super().__init__()
        self.other = conv_bn(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([F.relu(self.stem(x)), F.relu(self.other(x))], 2)
        return self.head(both.flatten(1, 2))


class StackAsBranches(Wide):
    """Branches side by side, weighted and summed (selective kernels)."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.gate = conv_bn(3, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([F.relu(self.stem(x)), F.relu(self.other(x))], 1)
        weight = self.gate(both.sum(1).mean((2, 3))).softmax(1)
        return self.head((both * weight[:, :, None, None, None]).sum(1))


class JoinedWithInput(Wide):
    """The input's channels stay, those of the stem need not."""

    reads = 19

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, F.relu(self.stem(x))], 1))


LAYOUT = (
    Construct(Chunk, images(), removed=8),
    Construct(ChunkJoined, images(), removed=8),
    Construct(ChunkUneven, images(), removed=6),
    Construct(SplitUnequal, images(), removed=8),
    Construct(SplitEmptied, images(), removed=8),
    Construct(SplitByHalfOfShape, images(), removed=8),
    Construct(SliceByShape, images(), removed=8),
    Construct(SliceConstant, images(), removed=8),
    Construct(SliceStrided, images(), removed=8),
    Construct(SliceResidual, images(), removed=10),
    Construct(UnbindChannels, images(), reason="a tensor of its own"),
    Construct(Glu, images(), removed=8),
    Construct(PixelShuffle, images(), removed=8),
    Construct(PixelUnshuffle, images(), removed=8),
    Construct(SpaceToDepth, images(), removed=8),
    Construct(PatchMerging, images(), removed=8),
    Construct(ChannelShuffle, images(), removed=8),
    Construct(ChannelShuffleModule, images(), removed=8),
    Construct(ChannelShuffleConstant, images(), removed=8),
    Construct(GroupedShuffleGrouped, images(), removed=20),
    Construct(ShuffleUnit, images(), removed=16),
    Construct(Repeat, images(), removed=8),
    Construct(RepeatInterleave, images(), removed=8),
    Construct(RepeatShortcut, images(), removed=24),
    Construct(ZeroPadShortcut, images(), removed=20),
    Construct(ZerosJoinedShortcut, images(), removed=16),
    Construct(PadByOne, images(), removed=8),
    Construct(Cropped, images(), removed=8),
    Construct(IndexSelect, images(), removed=4),
    Construct(IndexByBuffer, images(), removed=8),
    Construct(IndexByList, images(), removed=3),
    Construct(RowsByIndexOfTwoAxes, images(), removed=8),
    Construct(ChannelsByIndexOfTwoAxes, images(), reason="is told sizes or positions"),
    Construct(GapsBesideList, images(), reason="is told sizes or positions"),
    Construct(PixelsByMask, images(), removed=8),
    Construct(GapsBehindMask, images(), reason="is told sizes or positions"),
    Construct(Roll, images(), removed=8),
    Construct(RollAdded, images(), removed=8),
    Construct(Flip, images(), removed=8),
    Construct(FlipAdded, images(), removed=8),
    Construct(Stack, images(), removed=16),
    Construct(StackAsBranches, images(), removed=16),
    Construct(JoinedWithInput, images(), removed=8),
)
