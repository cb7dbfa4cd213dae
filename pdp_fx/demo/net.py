"""A small residual net for 8 x 8 digits, written as a user would: nothing in it knows of pruning."""

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the shortcut projects where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, out_channels, h / stride, w / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """A gate in [0, 1] for each channel, computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of (n, channels, h, w)."""
        gate = torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(gate))


class DepthwiseBlock(nn.Module):
    """Widen, filter each channel by itself, gate, narrow; added to the input."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.SiLU(),
        )
        self.gate = SqueezeExcite(hidden, hidden // 4)
        self.project = nn.Sequential(nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape (n, channels, h, w)."""
        return x + self.project(self.gate(self.depthwise(self.expand(x))))


class DigitNet(nn.Module):
    """Images (n, 1, 8, 8) to logits (n, 10); 84 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.block1 = BasicBlock(16, 16)
        self.block2 = BasicBlock(16, 32, stride=2)
        self.block3 = DepthwiseBlock(32, 64)
        self.block4 = BasicBlock(32, 64, stride=2)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        x = self.block2(self.block1(self.stem(images)))
        x = self.block4(self.block3(x))
        return self.classifier(x.mean((2, 3)))
