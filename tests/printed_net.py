"""The net of the printed graphs; the golden texts name its lines, so new lines go to the end."""

from torch import Tensor, nn


class Printed(nn.Module):
    """A conv with BatchNorm and a classifier; images (n, 3, 4, 4) to (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn(self.conv(images)).relu()
        return self.fc(x.mean((2, 3)))
