"""Layers that random nets are made of, each with the shapes that it takes and gives."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.channels.nets_weights import ScaledStandardised
from tests.channels.random_ops import WIDTHS, Fit, Layer, Shape, image, only


class Excite(nn.Module):
    """Squeeze and excite, its gate reshaped by the sizes it finds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 4), nn.Linear(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(F.relu(self.down(x.mean((2, 3))))).view(x.shape[0], x.shape[1], 1, 1)
        return x * torch.sigmoid(gate)


class Attention(nn.Module):
    """Self-attention of two heads; q, k and v in one layer or in three."""

    def __init__(self, channels: int, packed: bool, written: bool) -> None:
        super().__init__()
        self.packed, self.written = packed, written
        self.parts = nn.ModuleList(
            [nn.Linear(channels, 18)] if packed else [nn.Linear(channels, 6) for _ in range(3)]
        )
        self.out = nn.Linear(6, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts[0](x).chunk(3, -1) if self.packed else [part(x) for part in self.parts]
        b, t = x.shape[:2]
        q, k, v = (part.view(b, t, 2, 3 if self.written else -1).transpose(1, 2) for part in parts)
        y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, 6) if self.written else y.transpose(1, 2).flatten(2))


class Scaled(nn.Module):
    """A learned scale and shift for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.rand(channels, 1, 1)),
            nn.Parameter(torch.rand(channels, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Buffered(nn.Module):
    """A fixed scale and shift for each channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(channels, 1, 1))
        self.register_buffer("shift", torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Tabled(nn.Module):
    """A fixed scale and shift for each channel, made in forward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(self.channels, dtype=x.dtype, device=x.device)
        return x * (1 + place.sin().view(-1, 1, 1)) + 2.0 ** -place[:, None, None]


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight + self.up @ self.down, self.bias)


class AlongChannels(nn.Module):
    """A layer whose module sees channels first, as Conv1d does, on tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


def _wide(kind: str) -> Fit:
    return lambda shape, knob: (kind, WIDTHS[knob], shape[2]) if shape[0] == kind else None


def _grouped(groups: int) -> Fit:
    def fit(shape: Shape, knob: int) -> Shape | None:
        fitting = shape[0] == "image" and shape[1] % groups == 0 and shape[1] > groups
        return ("image", groups * (knob + 2), shape[2]) if fitting else None

    return fit


def _conv(
    shape: Shape, out: int, size: int = 3, stride: int = 1, groups: int = 1, bias: bool = True
) -> nn.Conv2d:
    return nn.Conv2d(shape[1], out, size, stride, size // 2, groups=groups, bias=bias)


def _conv_bn(shape: Shape, out: int, groups: int = 1) -> nn.Module:
    return nn.Sequential(_conv(shape, out, groups=groups, bias=False), nn.BatchNorm2d(out))


def _up(shape: Shape, out: int, groups: int = 1) -> nn.Module:
    return nn.ConvTranspose2d(shape[1], out, 2, 2, groups=groups)


LAYERS: dict[str, Layer] = {
    "conv": (_wide("image"), lambda s, k: _conv(s, WIDTHS[k])),
    "conv_1x1": (_wide("image"), lambda s, k: _conv(s, WIDTHS[k], 1, bias=k % 2 == 0)),
    "conv_bn": (_wide("image"), lambda s, k: _conv_bn(s, WIDTHS[k])),
    "conv_bn_relu": (
        _wide("image"),
        lambda s, k: nn.Sequential(_conv_bn(s, WIDTHS[k]), nn.ReLU(inplace=True)),
    ),
    "conv_stride": (
        image(lambda c, s, k: (WIDTHS[k], (s + 1) // 2)),
        lambda s, k: _conv(s, WIDTHS[k], stride=2),
    ),
    "grouped_2": (_grouped(2), lambda s, k: _conv(s, 2 * (k + 2), groups=2)),
    "grouped_3": (_grouped(3), lambda s, k: _conv_bn(s, 3 * (k + 2), groups=3)),
    "standardised": (_wide("image"), lambda s, k: ScaledStandardised(s[1], WIDTHS[k], 3)),
    "standardised_2": (_grouped(2), lambda s, k: ScaledStandardised(s[1], 2 * (k + 2), 3, groups=2)),
    "spectral": (_wide("image"), lambda s, k: spectral_norm(_conv(s, WIDTHS[k]))),
    "adapted": (_wide("tokens"), lambda s, k: Adapted(s[1], WIDTHS[k])),
    "depthwise": (only("image"), lambda s, k: _conv(s, s[1], groups=s[1], bias=k > 1)),
    "multiplied": (image(lambda c, s, k: (2 * c, s)), lambda s, k: _conv_bn(s, 2 * s[1], groups=s[1])),
    "up": (image(lambda c, s, k: (WIDTHS[k], 2 * s)), lambda s, k: _up(s, WIDTHS[k])),
    "up_grouped": (
        image(lambda c, s, k: (2 * (k + 1), 2 * s) if c % 2 == 0 else None),
        lambda s, k: _up(s, 2 * (k + 1), groups=2),
    ),
    "norm": (only("image"), lambda s, k: nn.BatchNorm2d(s[1], affine=k > 0)),
    "group_norm": (only("image"), lambda s, k: nn.GroupNorm((1, 2 - s[1] % 2, s[1])[k % 3], s[1])),
    "prelu": (only("image"), lambda s, k: nn.PReLU(s[1] if k else 1)),
    "excite": (only("image"), lambda s, k: Excite(s[1])),
    "scaled": (only("image"), lambda s, k: Scaled(s[1])),
    "buffered": (only("image"), lambda s, k: Buffered(s[1])),
    "tabled": (only("image"), lambda s, k: Tabled(s[1])),
    "residual": (only("image"), lambda s, k: Residual(s)),
    "linear": (_wide("vector"), lambda s, k: nn.Linear(s[1], WIDTHS[k])),
    "linear_norm": (
        _wide("vector"),
        lambda s, k: nn.Sequential(nn.Linear(s[1], WIDTHS[k]), nn.BatchNorm1d(WIDTHS[k])),
    ),
    "token_linear": (_wide("tokens"), lambda s, k: nn.Linear(s[1], WIDTHS[k], bias=k > 0)),
    "token_norm": (only("tokens"), lambda s, k: nn.LayerNorm(s[1])),
    "token_conv": (_wide("tokens"), lambda s, k: AlongChannels(nn.Conv1d(s[1], WIDTHS[k], 3, padding=1))),
    "token_mixer": (
        lambda shape, k: ("tokens", shape[1], WIDTHS[k]) if shape[0] == "tokens" else None,
        lambda s, k: AlongChannels(nn.Linear(s[2], WIDTHS[k])),
    ),
    "attention": (only("tokens"), lambda s, k: Attention(s[1], packed=k % 2 == 0, written=k > 1)),
}


class Residual(nn.Module):
    """A bottleneck around which its input passes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner = nn.Sequential(_conv_bn(shape, 5), nn.ReLU(), nn.Conv2d(5, shape[1], 1, bias=False))
        self.norm = nn.BatchNorm2d(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.inner(x)))
