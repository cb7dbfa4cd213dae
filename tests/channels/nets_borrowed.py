"""Sizes that are read off one tensor and used for another, whose channels are others."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, sequences


class Borrowed(nn.Module):
    """Two branches of eight channels each; the second is laid out by the size of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.other = nn.Linear(6, 8), nn.Linear(6, 8)
        self.mid, self.head = nn.Linear(8, 6), nn.Linear(6, 5)
        self.table = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.relu(self.stem(x)), F.relu(self.other(x))
        return self.head(F.relu(self.mid(self.act(first, second)))) + first.sum() + second.sum()

    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return first


class SplitBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        width = first.shape[-1]
        half = second.split([width // 2, width - width // 2], -1)
        return torch.cat([half[1], half[0]], -1)


class RowsBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return F.linear(second, self.table[: first.shape[-1]])


class NarrowBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second.narrow(-1, 0, first.size(-1))


class ViewBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second.transpose(0, 1).reshape(second.shape[1], second.shape[0], first.size(2)).transpose(0, 1)


class NormBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return F.layer_norm(second, (first.shape[-1],))


class RollBySizeOfAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second.roll(first.shape[-1] - 5, -1) + second.roll(first.shape[-1], 1)


class GroupsBySizeOfAnother(Borrowed):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 1, 1))

    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return F.conv1d(second.mT, self.kernel, groups=first.shape[-1]).mT


class ViewAsAnother(Borrowed):
    """The result has the shape of the first branch and the channels of the second."""

    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second.flatten(1).view_as(first)


class ConstantAsAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second + torch.ones(40, dtype=first.dtype).reshape_as(first[0])


class ExpandedAsAnother(Borrowed):
    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second[..., :1].expand_as(first)


class AttentionFromQueries(nn.Module):
    """Learned queries ask; torch splits the weight of the three projections by the queries' width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)
        self.attention, self.queries = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Parameter(torch.randn(3, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        found, _ = self.attention(self.queries.expand(x.shape[0], -1, -1), x, x)
        return self.head(F.relu(self.mid(found)))


class MeanOfGram(Borrowed):
    """A mean over both axes of a matrix of channels by channels."""

    def act(self, first: Tensor, second: Tensor) -> Tensor:
        return second * torch.bmm(first.mT, first).mean((1, 2)).view(-1, 1, 1)


BORROWED = (
    Construct(SplitBySizeOfAnother, sequences(), removed=3),
    Construct(RowsBySizeOfAnother, sequences(), removed=8),
    Construct(NarrowBySizeOfAnother, sequences(), removed=8),
    Construct(ViewBySizeOfAnother, sequences(), removed=8),
    Construct(NormBySizeOfAnother, sequences(), removed=3),
    Construct(RollBySizeOfAnother, sequences(), removed=3),
    Construct(GroupsBySizeOfAnother, sequences(), removed=3),
    Construct(ViewAsAnother, sequences(), removed=8),
    Construct(ConstantAsAnother, sequences(), removed=3, reason="takes the sizes of a tensor"),
    Construct(ExpandedAsAnother, sequences(), removed=3),
    Construct(AttentionFromQueries, sequences(), removed=8),
    Construct(MeanOfGram, sequences(), removed=3),
)
