"""Operations that leave every channel where it is as long as none has gone, and rolls of several axes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images


class Unmoved(nn.Module):
    """Something done to eight channels between two convolutions."""

    all: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 6), nn.Conv2d(6, 5, 1)
        self.register_buffer("all", torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(self.act(F.relu(self.stem(x))))))

    def act(self, x: Tensor) -> Tensor:
        return x


class ViewOfItsShape(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.view(-1, 8, 6, 6)


class ReshapeToItsShape(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 8, x.shape[2], x.shape[3])


class ExpandToItsShape(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.expand(-1, 8, -1, -1)


class SumToItsShape(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x[0].sum_to_size(8, 6, 6) + x


class NarrowToAll(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.narrow(1, 0, 8)


class SplitIntoOne(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.split([8], 1)[0]


class SliceOfAll(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x[:, 0:8] + x[:, -8:]


class AllByNumber(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x[:, self.all] + x.index_select(1, self.all) + x[:, [0, 1, 2, 3, 4, 5, 6, 7]]


class WholeTurn(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.roll(8, 1) + torch.roll(x, -16, 1)


class RollOfAllAxes(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return torch.roll(x, shifts=(1, 3, 2), dims=(3, 1, 2))


class WholeTurnAndMore(Unmoved):
    def act(self, x: Tensor) -> Tensor:
        return x.roll((16, 1), (1, 2))


class RollWithoutAxis(Unmoved):
    """What is rolled out of one example comes into the next."""

    def act(self, x: Tensor) -> Tensor:
        return x.roll(36)


UNMOVED = (
    Construct(ViewOfItsShape, images(), removed=7),
    Construct(ReshapeToItsShape, images(), removed=7),
    Construct(ExpandToItsShape, images(), removed=7),
    Construct(SumToItsShape, images(), removed=7),
    Construct(NarrowToAll, images(), removed=7),
    Construct(SplitIntoOne, images(), removed=7),
    Construct(SliceOfAll, images(), removed=7),
    Construct(AllByNumber, images(), removed=7),
    Construct(WholeTurn, images(), removed=7),
    Construct(RollOfAllAxes, images(), removed=7),
    Construct(WholeTurnAndMore, images(), removed=7),
    Construct(RollWithoutAxis, images(), removed=3, reason="rolled along all axes at once"),
)
