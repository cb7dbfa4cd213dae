"""The old ways of making a tensor of a tensor, which no torch function shows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque


class Wraps(nn.Module):
    """Uses a tensor that is made of another between two layers."""

    order: Tensor

    def __init__(self, act: "Callable[[Wraps, Tensor], Tensor]") -> None:
        super().__init__()
        self.act, self.first, self.last = act, nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("order", torch.arange(8).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self, self.first(x)))


def written(x: Tensor) -> Tensor:
    """What is written into a view is in the tensor, too."""
    x = x * 1
    Variable(x.data).mul_(2)
    return x


WAYS: dict[str, Callable[[Wraps, Tensor], Tensor]] = {
    "a variable has no gradient": lambda _, x: x * Variable(x),
    "a tensor of a tensor has its gradient": lambda _, x: x * torch.Tensor(x),
    "of a result that is used nowhere else": lambda _, x: (
        x + Variable(x * 2) + torch.Tensor(torch.zeros(8) + 1)
    ),
    "of a buffer": lambda model, x: x.index_select(1, Variable(model.order)),
    "of a parameter": lambda model, x: (
        x + Variable(model.first.bias).sum() + torch.Tensor(model.last.bias).sum()
    ),
    "memory of the size": lambda _, x: torch.cat([x[:, :4], torch.Tensor(torch.zeros(x.shape[0], 4))], 1),
    "an empty one": lambda _, x: torch.cat([torch.Tensor(), x.new(), x, torch.FloatTensor()], 1),
    "written": lambda _, x: written(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_tensor_is_followed(way: str) -> None:
    model = Wraps(WAYS[way])
    gm = exact(model, torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)
    grads: list[list[Tensor]] = []
    for net in (model, gm):
        net.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))


def test_a_variable_that_is_a_leaf_of_its_own_is_refused() -> None:
    with pytest.raises(TraceError, match="a tensor made by code that torch functions do not show"):
        trace(Wraps(lambda _, x: x * Variable(x.data, requires_grad=True)), torch.randn(3, 4))
