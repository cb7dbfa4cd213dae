"""Values that are used twice at each of many levels: what doubles with each level would never end here."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdp_fx.trace import trace

LEVELS = 40


class Pyramid(nn.Module):
    """Halves what it is given and pads it to an even size before, level by level, and goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        size, sizes = x.shape[2], list[int]()
        for _ in range(LEVELS):
            pad = size % 2
            sizes.append(size)
            size = (size + pad) // 2
        small = F.interpolate(self.layer(x), size=size)
        return torch.stack([F.interpolate(small, size=each).sum(-1) for each in sizes])


class Draws(nn.Module):
    """Branches in training on a number that it computes from a random one, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand(())
        for _ in range(LEVELS):
            number = (number * 2 - torch.floor(number * 2) + number) / 2
        if not self.training or number > 0.5:
            x = self.layer(x)
        return torch.relu(x)


def test_sizes_that_are_computed_of_sizes() -> None:
    model = Pyramid()
    gm = trace(model, (torch.randn(1, 2, 500),))
    for x in (torch.randn(2, 2, 777), torch.randn(3, 2, 31)):
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_random_numbers_that_are_computed_of_random_numbers() -> None:
    model, x = Draws(), torch.randn(3, 2)
    gm = trace(model, (x,))
    for seed in range(8):
        torch.manual_seed(seed)
        wanted = model.train()(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(gm.train()(x), wanted, rtol=0, atol=0)
