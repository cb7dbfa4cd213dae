"""Reshapes with and without written sizes, products of activations, einsum, windows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.channels.construct import Construct, conv_bn, images, sequences, vectors, words


class Flatten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.max_pool2d(F.relu(self.stem(x)), 2), 1))


class FlattenNhwc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        return self.head(x.permute(0, 2, 3, 1).reshape(x.shape[0], -1))


class FlattenConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.hidden, self.head = conv_bn(3, 8), nn.Linear(8 * 36, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).view(-1, 8 * 6 * 6)
        return self.head(F.relu(self.hidden(x)))


class FlattenThenNorm(nn.Module):
    """One BatchNorm entry for every pixel of every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm1d(8 * 16), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.stem(x).flatten(1))))


class Unflatten(nn.Module):
    """A linear layer makes an image, as generators do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.head = (
            nn.Linear(6, 8 * 9),
            nn.ConvTranspose2d(8, 6, 2, 2),
            nn.Conv2d(6, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).view(x.shape[0], 8, 3, 3)
        return self.head(F.relu(self.up(x)))


class UnflattenModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shape, self.head = nn.Linear(6, 8 * 9), nn.Unflatten(1, (8, 3, 3)), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.shape(self.stem(x))))


class TokensAndBack(nn.Module):
    """Image to tokens, a linear layer, and back to an image by the sizes of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = conv_bn(3, 8), nn.Linear(8, 12), nn.Conv2d(12, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, _, h, w = x.shape
        x = F.relu(self.mix(x.flatten(2).transpose(1, 2)))
        return self.head(x.transpose(1, 2).reshape(b, 12, h, w))


class Windows(nn.Module):
    """Windows are cut out of a channels-last image and put back; a layer works inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        x = x.view(b, h // 3, 3, w // 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, c)
        x = x + F.gelu(self.mix(x))
        x = x.view(b, h // 3, w // 3, 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return self.head(torch.roll(x, (1, 1), (1, 2)))


class WindowsConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)).permute(0, 2, 3, 1).view(-1, 2, 3, 2, 3, 8)
        x = F.gelu(self.mix(x.transpose(2, 3).reshape(-1, 9, 8)))
        return self.head(x.view(-1, 36 * 8).view(-1, 2, 2, 9, 8))


class EinsumWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(6, 5, 1)
        self.mix = nn.Parameter(torch.randn(6, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(torch.einsum("bchw,oc->bohw", F.relu(self.stem(x)), self.mix)))


class EinsumActivations(nn.Module):
    """Similarity of all pairs of pixels, summed over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = conv_bn(3, 8), conv_bn(3, 8), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x).flatten(2), self.right(x).flatten(2)
        return self.head(torch.einsum("bcn,bcm->bnm", left, right).softmax(-1).mean(1))


class Gram(nn.Module):
    """Products of all pairs of channels: an entry goes if either of its channels goes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.mid(F.relu(self.stem(x)))).flatten(2)
        return self.head((x @ x.transpose(1, 2)).flatten(1))


class MatmulParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(6, 8) / 3), nn.Parameter(torch.randn(8))
        self.head = nn.Parameter(torch.randn(8, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.weight + self.shift) @ self.head


class AddmmParameter(nn.Module):
    """GPT-2's layer: a weight whose rows are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(6, 8) / 3), nn.Parameter(torch.randn(8))
        self.head, self.last = nn.Parameter(torch.randn(8, 5) / 3), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.shift, x.view(-1, x.size(-1)), self.weight).view(x.shape[:-1] + (8,))
        hidden = F.gelu(hidden)
        return torch.addmm(self.last, hidden.view(-1, hidden.size(-1)), self.head).view(x.shape[:-1] + (5,))


class FunctionalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.shift = nn.Parameter(torch.randn(8, 6) / 3), nn.Parameter(torch.randn(8))
        self.head = nn.Parameter(torch.randn(5, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.hidden, self.shift)), self.head)


class MixerTokens(nn.Module):
    """A layer along the tokens, one along the channels (MLP-Mixer without norms)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        x = x + self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(x.mean(1))


class UnitLength(nn.Module):
    """Zeros add nothing to a length."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(F.relu(self.stem(x)), dim=-1))


class SumOverChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = conv_bn(3, 8), conv_bn(3, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.gate(x)) * F.relu(self.stem(x)).sum(1, keepdim=True))


class Interpolate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.head = conv_bn(3, 8), conv_bn(8, 8, stride=2), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.stem(x))
        low = F.interpolate(
            F.relu(self.down(high)), size=high.shape[-2:], mode="bilinear", align_corners=False
        )
        return self.head(torch.cat([high, low], 1))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        parts = [F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1), F.avg_pool2d(x, 6)]
        return self.head(torch.cat(parts, 1).flatten(1))


class Unpooled(nn.Module):
    """What was greatest goes back to its place, as in SegNet."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        small, places = self.pool(F.relu(self.stem(x)))
        return self.head(F.relu(self.mid(self.unpool(small, places))))


class UnpooledElsewhere(Unpooled):
    """To the places of the input, which has no channels that could go."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = conv_bn(3, 3), conv_bn(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        _, places = self.pool(x)
        small = F.max_pool2d(F.relu(self.stem(x)), 2)
        return self.head(F.relu(self.mid(self.unpool(small, places))))


class Axial(nn.Module):
    """Convolutions along one axis at a time, the other folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.along, self.head = conv_bn(3, 8), nn.Conv1d(8, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, c, h, w = x.shape
        x = F.relu(self.along(x.permute(0, 2, 1, 3).reshape(b * h, c, w)))
        return self.head(x.mean(-1).view(b, h, -1).mean(1))


class TimeDistributed(nn.Module):
    """Frames are folded into the batch and unfolded again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.head = nn.Embedding(11, 8), nn.Conv1d(8, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Tensor:
        b, t = words.shape
        x = F.relu(self.table(words.reshape(b * t)).reshape(b, t, -1).transpose(1, 2))
        return self.head(F.relu(self.conv(x)).transpose(1, 2).reshape(b * t, -1)).view(b, t, 5)


class TokensOfOneLayer(nn.Module):
    """What one layer makes is taken for four tokens, all of which another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 32), nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.relu(self.stem(x)).view(-1, 4, 8)
        return self.head(F.relu(self.mid(tokens)))


class PixelsOfAnotherOrder(TokensOfOneLayer):
    """Channels that are taken for tokens in the wrong order, so that all of them go together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mid(F.relu(self.stem(x)).reshape(x.shape[0], -1, 8))))


class PositionsInRows(nn.Module):
    """Positions of a picture in one axis, laid out along two; the channels are what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.positions = nn.Parameter(torch.randn(1, 36, 8))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions.reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
        return self.head(torch.relu(self.embed(x) + positions))


class PositionsOfBuffer(nn.Module):
    """The same in a buffer, some of which are cut out."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.register_buffer("positions", torch.randn(1, 64, 8))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions.reshape(1, 8, 8, -1)[:, 1:7, 1:7, :].permute(0, 3, 1, 2)
        return self.head(torch.relu(self.embed(x) + positions))


RESHAPING = (
    Construct(TokensOfOneLayer, vectors(), removed=18),
    Construct(PixelsOfAnotherOrder, images(size=5), removed=2, reason="all of these channels go together"),
    Construct(Flatten, images(), removed=4),
    Construct(FlattenNhwc, images(), removed=4),
    Construct(FlattenConstant, images(), removed=7),
    Construct(FlattenThenNorm, images(), removed=4),
    Construct(Unflatten, vectors(), removed=39),
    Construct(UnflattenModule, vectors(), removed=36),
    Construct(TokensAndBack, images(), removed=10),
    Construct(Windows, images(), removed=8),
    Construct(WindowsConstant, images(), removed=8),
    Construct(EinsumWeight, images(), removed=7),
    Construct(EinsumActivations, images(), removed=8),
    Construct(Gram, images(), removed=4, reason="merged with another axis of channels"),
    Construct(MatmulParameter, sequences(), removed=4),
    Construct(AddmmParameter, sequences(), removed=4),
    Construct(FunctionalLinear, sequences(), removed=4),
    Construct(MixerTokens, sequences(), removed=10),
    Construct(UnitLength, vectors(), removed=4),
    Construct(SumOverChannels, images(), removed=7),
    Construct(Interpolate, images(), removed=8),
    Construct(Pools, images(), removed=4),
    Construct(Unpooled, images(), removed=7),
    Construct(UnpooledElsewhere, images(), removed=3, reason="unpooling joins these channels"),
    Construct(Axial, images(), removed=7),
    Construct(TimeDistributed, words(), removed=7),
    Construct(PositionsInRows, images(), removed=4),
    Construct(PositionsOfBuffer, images(), removed=4),
)
