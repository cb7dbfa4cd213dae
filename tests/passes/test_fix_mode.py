import torch
from torch import Tensor, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import Unstructured
from tests.nets import at_once, convert_until, difference, listing, net, pruned

SPEC = at_once(Unstructured(0.5), {"aux": None})


class Branches(nn.Module):
    """A flag as an argument, a value picked by it, a step and a layer that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.aux = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.fc(x), 0.1 if self.training else 0.5, self.training)
        if self.training:
            x = self.aux(x + torch.rand_like(x))
        return torch.relu(x)


class InEval(nn.Module):
    """Steps that only eval mode has, among them one that draws random numbers, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.drop(x) if self.training else torch.sigmoid(x) + 0 * torch.rand(())


IN_EVAL = """\
x = input
fc_weight = fc.weight
fc_weight_masked = pdp.masks.fc_weight(fc_weight)
fc = fc(x, weight=fc_weight_masked)
dropout = dropout(fc, p=0.5, training=False, inplace=False)
relu = relu(dropout)"""


def test_only_what_happens_in_eval_mode_is_left() -> None:
    gm, _ = convert_until(pruned(Branches(), SPEC, torch.randn(4, 8)), "fix-mode")
    assert listing(gm) == IN_EVAL


def test_steps_of_eval_mode_are_called_without_a_condition() -> None:
    x = torch.randn(4, 8)
    prepared = pruned(InEval(), at_once(Unstructured(0.5)), x)
    gm, _ = convert_until(prepared, "fix-mode")
    assert "when" not in listing(gm)
    assert "drop" not in listing(gm)
    assert difference(prepared.eval(), gm, x) == 0


def test_the_result_is_what_the_prepared_model_gives_in_eval_mode() -> None:
    x = torch.randn(4, 8)
    prepared = pruned(Branches(), SPEC, x)
    gm, _ = convert_until(prepared, "fix-mode")
    assert difference(prepared.eval(), gm.train(), x) == 0
    assert difference(prepared, pdp_fx.convert(prepared), x) <= 1e-5


def test_a_graph_that_depends_on_no_mode_is_left_alone() -> None:
    model, x = net("small")
    prepared = pruned(model, Unstructured(0.5), x)
    gm, _ = convert_until(prepared, "fix-mode")
    assert listing(gm) == listing(prepared)
