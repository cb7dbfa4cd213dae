"""Gates, scales, branches, tables, and weights that are used more than once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth  # pyright: ignore[reportMissingTypeStubs]

from tests.channels.construct import Construct, conv_bn, images, pairs, sequences, words


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        gate = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return self.head(x * torch.sigmoid(gate))


class SqueezeExciteLinear(nn.Module):
    """The gate is made of linear layers and brought back to four axes by its own sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 1)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        b, c, _, _ = x.shape
        gate = self.up(F.relu(self.down(x.mean((2, 3))))).view(b, c, 1, 1)
        return self.head(x * F.hardsigmoid(gate))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = conv_bn(3, 8), conv_bn(8, 8), nn.Conv2d(8, 5, 1)
        self.gamma = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.gamma * F.relu(self.branch(x)))


class LearnedShift(nn.Module):
    """A shift after the last norm: a dropped channel is 0 only if the shift is masked too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x) + self.shift))


class FixedShift(nn.Module):
    """A buffer takes no mask, so the reader's columns must."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_bn(3, 8), nn.Conv2d(8, 5, 3, padding=1)
        self.register_buffer("shift", torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x) + self.shift))


class PReluPerChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.head = conv_bn(3, 8), nn.PReLU(8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.stem(x)))


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.mid = conv_bn(3, 8), conv_bn(8, 8), conv_bn(8, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = torch.sigmoid(self.gate(x))
        return self.head(gate * self.mid(x) + (1 - gate) * x)


class StochasticDepthLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = conv_bn(3, 8), conv_bn(8, 8), nn.Conv2d(8, 5, 1)
        self.drop = StochasticDepth(0.3, "row")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(x + self.drop(self.branch(x)))


class StochasticDepthByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = conv_bn(3, 8), conv_bn(8, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.branch(x)
        if self.training:
            y = y * (torch.rand(y.shape[0], 1, 1, 1, device=y.device, dtype=y.dtype) < 0.8) / 0.8
        return self.head(x + y)


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = conv_bn(3, 8), conv_bn(8, 8), nn.Linear(8, 5)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.mid(self.drop(F.relu(self.stem(x)))))
        return self.head(F.dropout(x.mean((2, 3)), 0.3, self.training))


class CalledTwice(nn.Module):
    """What goes into the layer has the channels that come out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.again, self.head = conv_bn(3, 8), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.again(F.relu(self.again(x)))))


class NormCalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.relu(self.norm(self.left(x))), F.relu(self.norm(self.right(x)))]
        return self.head(torch.cat(parts, 1))


class HeadOverPyramid(nn.Module):
    """One head on feature maps of several sizes, as detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv_bn(3, 8), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.tower, self.head = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        high = F.relu(self.stem(x))
        low = F.relu(self.down(high))
        return [self.head(F.relu(self.tower(level))) for level in (high, low)]


class SharedWeight(nn.Module):
    """Two layers own the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.right.weight = self.left.weight
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.left(x)), F.gelu(self.right(x.flip(-1)))], 1))


class TiedEmbedding(nn.Module):
    """The output layer is the embedding table, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.back, self.head = nn.Linear(16, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        return self.head(x + self.back(F.gelu(self.hidden(x))))


class Positions(nn.Module):
    """A table of positions, read by as many positions as there are."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(9, 8), nn.Linear(8, 5)
        self.register_buffer("positions", torch.arange(9)[None])

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words) + self.places(self.positions[:, : words.shape[1]])
        return self.head(F.relu(x))


class SinusoidBuffer(nn.Module):
    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("waves", torch.randn(1, 9, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.waves[:, : x.shape[1]]
        return self.head(F.relu(self.hidden(x)))


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 2, stride=2), nn.Linear(8, 5)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 10, 8))
        self.hidden, self.back = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        x = x + self.back(F.gelu(self.hidden(x)))
        return self.head(x[:, 0])


class FrozenBranch(nn.Module):
    """A branch whose weights are not trained joins one whose weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.free, self.head = conv_bn(3, 8), conv_bn(3, 8), nn.Conv2d(8, 5, 1)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fixed(x) + self.free(x)))


class DetachedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = conv_bn(3, 8), conv_bn(8, 8), conv_bn(8, 8)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        with torch.no_grad():
            still = self.left(x)
        return self.head(F.relu(still + self.right(x.detach())))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = conv_bn(3, 8), nn.Linear(6, 8), nn.Conv2d(8, 5, 1)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        gate = torch.tanh(self.text(text).mean(1))
        return {"out": self.head(F.relu(self.image(image)) * gate[:, :, None, None]), "text": gate.sum(1)}


class TwoHeads(nn.Module):
    """Two detection heads; in training one does not train the stem. Both return the same list of features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.many, self.one = (nn.Sequential(conv_bn(8, 6), nn.Conv2d(6, 4, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, dict[str, Any]]:
        features = [F.relu(self.stem(x))]
        cut_off = [each.detach() for each in features] if self.training else features
        return {"many": self.boxes(features, self.many), "one": self.boxes(cut_off, self.one)}

    def boxes(self, features: list[Tensor], head: nn.Module) -> dict[str, Any]:
        batch = features[0].shape[0]
        return {"boxes": head(features[0]).view(batch, 4, -1), "features": features}


SHARING = (
    Construct(SqueezeExcite, images(), removed=10),
    Construct(SqueezeExciteLinear, images(), removed=10),
    Construct(LayerScale, images(), removed=8),
    Construct(LearnedShift, images(), removed=4),
    Construct(FixedShift, images(), removed=4),
    Construct(PReluPerChannel, images(), removed=4),
    Construct(Highway, images(), removed=12),
    Construct(StochasticDepthLayer, images(), removed=8),
    Construct(StochasticDepthByHand, images(), removed=8),
    Construct(Dropouts, images(), removed=8),
    Construct(CalledTwice, images(), removed=8),
    Construct(NormCalledTwice, images(), removed=8),
    Construct(HeadOverPyramid, images(), removed=11),
    Construct(SharedWeight, images(), removed=4),
    Construct(TiedEmbedding, words(), removed=16),
    Construct(Positions, words(), removed=8),
    Construct(SinusoidBuffer, sequences(), removed=8),
    Construct(ClassToken, images(), removed=16),
    Construct(FrozenBranch, images(), removed=8),
    Construct(DetachedBranch, images(), removed=12),
    Construct(TwoInputs, pairs(images(), sequences()), removed=8),
    Construct(TwoHeads, images(), removed=6, reason="returns these channels"),
)
