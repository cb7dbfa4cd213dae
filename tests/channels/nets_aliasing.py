"""Writing in place to tensors that share memory with others."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images

OVERWRITTEN = "written to in place through a view"


class Written(nn.Module):
    """Two branches of eight channels, what is done with them in place, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side, self.head = conv_bn(3, 8), conv_bn(3, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.act(F.relu(self.stem(x)), F.relu(self.side(x)))))

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class GhostResidual(Written):
    """The first part of a concatenation is added to, and nobody asks for the rest again."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        kept = torch.cat([x, x], 1)[:, :8]
        kept += y
        return kept


class HalvesInPlace(Written):
    """Parts of one tensor that are written to, each in its way."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + y
        hidden, context = both[:, :5], both[:, 5:]
        hidden *= 2
        context.relu_()
        return torch.cat([hidden, context], 1)


class TurnedInPlace(Written):
    """A view of all that is there is written to and used."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        turned = (x + y).transpose(2, 3)
        turned *= 2
        return turned


class BaseReadAgain(Written):
    """A part is written to and the whole is read."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        part = both[:, :4]
        part += y[:, :4]
        return both


class CopiedIntoBase(Written):
    """A part is replaced by something else and the whole is read."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        both[:, 2:6].copy_(y[:, :4])
        return both


class WrittenAsOut(Written):
    """A part is where an operation puts its result, and the whole is read."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            both = x + 0
            torch.mul(y[:, :4], 2.0, out=both[:, 2:6])
        return both


class PartReadAfterBase(Written):
    """The whole is written to and a part from before is read."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        part = both[:, :4]
        both += y
        return torch.cat([part, part], 1)


class PartsThatOverlap(Written):
    """Two parts share two channels."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        left, right = both[:, :5], both[:, 3:]
        left += y[:, :5]
        return torch.cat([left[:, :3], right], 1)


class PartOfAPart(Written):
    """A view of a view is written to."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        outer = (x + 0)[:, :8]
        outer[:, :3].mul_(y[:, :3])
        return outer


class BuiltFromParts(Written):
    """Each branch is written to its half of unset memory of a given size."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.empty(x.shape[0], 16, *x.shape[2:], dtype=x.dtype)
        both[:, :8] = x
        both[:, 8:] = y
        return both[:, 2:8] + both[:, 10:]

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(6, 5, 1)


class Interleaved(Written):
    """Two branches take turns along the rows of unset memory."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.empty_like(x)
        both[..., ::2, :] = x[..., ::2, :]
        both[..., 1::2, :] = y[..., ::2, :]
        return both


class TakingTurns(Written):
    """Two branches take turns along the channels of unset memory."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.empty_like(x)
        both[:, ::2] = x[:, :4]
        both[:, 1::2] = y[:, 4:]
        return both


class OnesInAPart(Written):
    """Numbers are written to a part of each of some channels, which vanish no more."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x * y
        both[:, 2:6, 1:3] = 1.0
        both[:, 5:, 0] += 2
        return both


class Mirrored(Written):
    """The channels are written backwards over themselves."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        both[:] = y.flip(1)
        both[:, :, 1:] = both[:, :, :-1].flip(1)
        return both


class TwoNames(Written):
    """A part is written to by one name, read by another, and the whole by a third."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = x + 0
        rows, part = both.flatten(2), both[:, 3:]
        part.mul_(y[:, :5])
        return both + rows.unflatten(2, (x.shape[2], x.shape[3])) * part.mean()


class WeightInParts(Written):
    """A part of a copy of the weight is written to before it is used."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.stem[0].weight.clone()  # pyright: ignore[reportCallIssue]
        weight[:, :, 1] *= 2
        weight[2:4] = 0.5
        return F.conv2d(x[:, :3] + y[:, 5:], weight, padding=1)


class BaseReturned(Written):
    """The whole is an output of the model."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        both = self.stem(x) + 0
        part = both[:, :4]
        part.copy_(F.relu(self.side(x))[:, 4:])
        return self.head(torch.cat([part, part], 1)), both


class WrittenUnseen(Written):
    """What autograd has saved is written to without its knowing."""

    def act(self, x: Tensor, y: Tensor) -> Tensor:
        both = (x + y).sigmoid()
        both.data.clamp_(max=0.6)
        both.data[:, 4:].mul_(0.5)
        return both


ALIASING = (
    Construct(WrittenUnseen, images(), removed=8),
    Construct(GhostResidual, images(), removed=8),
    Construct(HalvesInPlace, images(), removed=8),
    Construct(TurnedInPlace, images(), removed=8),
    Construct(BaseReadAgain, images(), removed=8),
    Construct(CopiedIntoBase, images(), removed=8),
    Construct(WrittenAsOut, images(), removed=8),
    Construct(PartReadAfterBase, images(), removed=8),
    Construct(PartsThatOverlap, images(), removed=2),
    Construct(PartOfAPart, images(), removed=6),
    Construct(BuiltFromParts, images(), removed=6),
    Construct(Interleaved, images(), removed=8),
    Construct(TakingTurns, images(), reason="setitem is told sizes or positions of these channels"),
    Construct(OnesInAPart, images(), removed=8),
    Construct(Mirrored, images(), removed=8),
    Construct(TwoNames, images(), removed=6),
    Construct(WeightInParts, images(), reason=OVERWRITTEN),
    Construct(BaseReturned, images(), removed=2, reason="the model returns these channels"),
)
