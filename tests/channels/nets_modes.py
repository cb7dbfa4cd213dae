"""Nets that do something else in eval mode than in training mode, which the other mode could not even run.

In training they work on three groups of rows at once. What one mode alone does is called in this mode only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.channels.construct import Construct, sequences


class _Grouped(nn.Module):
    """Rows of a table, all of them in training mode; in eval mode those of one group only."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(12, 6))
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows if self.training else self.rows[:4]
        y = self.up(rows + x.mean(1, keepdim=True)).relu()
        if self.training:
            one, two, three = y.split(4, dim=1)
            return self.down(one + two + three)
        return self.down(self.alone(y))

    def alone(self, y: Tensor) -> Tensor:
        """What eval mode does."""
        return y


class GroupsInTraining(_Grouped):
    """Attention within each group, whose heads are viewed by sizes that differ between the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows if self.training else self.rows[:4]
        y = self.up(rows + x.mean(1, keepdim=True)).relu()
        if self.training:
            one, two, three = y.split(4, dim=1)
            y = torch.cat((one, two, three))
        b, n, _ = y.shape
        heads = (layer(y).view(b, n, -1, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.down(y)


class DividedInEval(_Grouped):
    """In eval mode a tensor is divided by the number of its channels."""

    def alone(self, y: Tensor) -> Tensor:
        return y / y.size(-1)


class ShuffledInEval(_Grouped):
    """In eval mode the two halves of the channels take turns."""

    def alone(self, y: Tensor) -> Tensor:
        b, n, c = y.shape
        return y.view(b, n, 2, c // 2).transpose(2, 3).reshape(b, n, c)


class ViewedInEval(_Grouped):
    """In eval mode a view is told a number of channels."""

    def alone(self, y: Tensor) -> Tensor:
        return (y.view(-1, 16) * 2).view(-1, 4, 16)


class SwappedInEval(_Grouped):
    """In eval mode the two halves of the channels are swapped."""

    def alone(self, y: Tensor) -> Tensor:
        one, two = y.chunk(2, dim=-1)
        return torch.cat((two, one), dim=-1)


class SoftmaxInEval(_Grouped):
    """In eval mode a softmax runs over the channels."""

    def alone(self, y: Tensor) -> Tensor:
        return y.softmax(-1)


class NormedInEval(_Grouped):
    """In eval mode the channels are normalized, by a function."""

    def alone(self, y: Tensor) -> Tensor:
        return F.layer_norm(y, (16,))


class NormedByModuleInEval(_Grouped):
    """In eval mode the channels are normalized, by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        nn.init.uniform_(self.norm.weight)
        nn.init.uniform_(self.norm.bias)

    def alone(self, y: Tensor) -> Tensor:
        return self.norm(y)


class DeviationInEval(_Grouped):
    """In eval mode the channels are divided by their standard deviation."""

    def alone(self, y: Tensor) -> Tensor:
        return y / (1 + y.std(-1, keepdim=True))


class LayerInEval(_Grouped):
    """In eval mode there is one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(16, 16)

    def alone(self, y: Tensor) -> Tensor:
        return self.more(y).relu()


MODES: tuple[Construct, ...] = (
    Construct(GroupsInTraining, sequences(), removed=8 + 2 * 3),
    Construct(DividedInEval, sequences(), removed=8),
    Construct(ShuffledInEval, sequences(), removed=8),
    Construct(ViewedInEval, sequences(), removed=8),
    Construct(SwappedInEval, sequences(), removed=8),
    Construct(SoftmaxInEval, sequences(), reason="a softmax runs over these channels"),
    Construct(NormedInEval, sequences(), removed=8, through_norms=True),
    Construct(NormedByModuleInEval, sequences(), removed=8, through_norms=True),
    Construct(DeviationInEval, sequences(), removed=8, through_norms=True),
    Construct(LayerInEval, sequences(), removed=16),
)
