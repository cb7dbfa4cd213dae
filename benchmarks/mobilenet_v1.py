"""MobileNet-v1 (Howard et al. 2017, table 1) at width 1: 4,231,976 parameters, 568.7404e6 MACs at 224 x 224.

torchvision has no version 1; the paper's dense count of 568.7e6 multiply-accumulates is of this net.
"""

from torch import Tensor, nn

# (output channels, stride) of the thirteen depthwise-separable blocks.
BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
)


def conv_bn(
    channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution that keeps the size (up to its stride), batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class MobileNetV1(nn.Module):
    """Images (n, 3, h, w) to logits (n, classes)."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        channels = 32
        self.stem = conv_bn(3, channels, kernel_size=3, stride=2)
        self.blocks = nn.Sequential()
        for out_channels, stride in BLOCKS:
            self.blocks.append(
                nn.Sequential(
                    conv_bn(channels, channels, kernel_size=3, stride=stride, groups=channels),
                    conv_bn(channels, out_channels, kernel_size=1),
                )
            )
            channels = out_channels
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        features = self.pool(self.blocks(self.stem(images)))
        return self.classifier(features.flatten(1))
