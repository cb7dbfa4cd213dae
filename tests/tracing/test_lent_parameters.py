"""Modules that are called with other parameters than their own."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque


class Lends(nn.Module):
    """Calls a part with its weights and with some that are computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.part = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.adapter = nn.Parameter(torch.randn(8, 6) / 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.stem(x)
        adapted = self.part.get_parameter("0.weight") + self.adapter
        return self.part(h), functional_call(self.part, {"0.weight": adapted}, h)


class LendsOfAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), functional_call(self.student, dict(self.teacher.named_parameters()), x)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else x


class LendsToOneThatDecides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Decides()

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.part, {"linear.weight": self.part.linear.weight * 2}, x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(4, 6), LendsToOneThatDecides()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.stem(x))


@pytest.mark.parametrize("model", [Lends(), LendsOfAnother()], ids=lambda model: type(model).__name__)
def test_a_module_called_with_lent_parameters_uses_those(model: nn.Module) -> None:
    gm = exact(model, torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)


def test_the_module_that_lends_stays_whole_where_the_borrower_decides_by_its_data() -> None:
    gm = exact(Around(), torch.randn(3, 4), torch.randn(5, 4))
    assert list(opaque(gm)) == ["inner"]


def test_a_model_that_lends_to_a_module_that_decides_is_refused_with_the_reason() -> None:
    with pytest.raises(TraceError, match="it lends tensors to part, which cannot be looked into"):
        trace(LendsToOneThatDecides(), torch.randn(3, 6))
