"""ResNet20 for 32 x 32 images (He et al. 2016): 272,282 parameters, as the paper's CIFAR-10 rows use it.

The three shortcuts that change the shape are 1x1 convolutions without batch norm.
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, h, w) to (n, out_channels, h / stride, w / stride)."""
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


class ResNet20(nn.Module):
    """Three stages of three blocks, of 16, 32 and 64 channels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        channels = 16
        for width in (16, 32, 64):
            for index in range(3):
                blocks.append(Block(channels, width, 2 if index == 0 and width > 16 else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, 3, 32, 32) to (n, classes)."""
        stream = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(stream.mean((2, 3)))
