import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pdp_fx import Channels, PruneSpec, Schedule, Unstructured, convert, prepare, step
from pdp_fx.granularity import Rule
from pdp_fx.ops.soft_mask import soft_mask_value
from pdp_fx.ops.threshold import threshold
from pdp_fx.spec import Forward
from tests.nets import (
    RULES,
    at_once,
    counts,
    mask_of,
    net,
    pruned,
    state,
)

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
TAU = 1e-2


def test_the_gradient_of_a_masked_weight_is_equation_2() -> None:
    model, x = net("mlp")
    model.double()
    prepared = pruned(model, at_once(Unstructured(0.7), tau=TAU), x.double())
    weight = prepared.get_parameter("fc2.weight")
    mask = mask_of(prepared, "fc2_weight")
    masked: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.retain_grad()
        masked.append(out)

    mask.register_forward_hook(keep)
    prepared.zero_grad()
    prepared(x.double()).square().sum().backward()
    squared, t = weight.detach().square(), threshold(weight, mask.count)
    m = soft_mask_value(weight, t, TAU)
    upstream = masked[0].grad
    assert upstream is not None
    expected = (m + 2 * squared / TAU * m * (1 - m)) * upstream
    torch.testing.assert_close(weight.grad, expected, rtol=1e-11, atol=1e-13)
    assert int(((m > 0.01) & (m < 0.99)).sum()) > 10


def test_a_channel_mask_reaches_the_loss_through_batch_norm() -> None:
    """Masking the conv weight before BatchNorm, the naive place, gives no gradient: BN cancels the scale."""
    model, x = net("conv")
    prepared = pruned(model, Channels(ratio=0.5), x)
    masks: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.retain_grad()
        masks[name] = out

    for name in ("conv1", "conv2"):
        mask_of(prepared, name).register_forward_hook(partial(keep, name))
    prepared(x).square().mean().backward()
    for name, mask in masks.items():
        grad = mask.grad
        assert grad is not None
        naive = naive_gradient(model, x, name)
        assert float(grad.abs().max()) > 1e-3
        assert float(naive.abs().max()) < 1e-3 * float(grad.abs().max()), name


def naive_gradient(model: nn.Module, x: Tensor, name: str) -> Tensor:
    """dL/dm at m = 0.5 when m multiplies the rows of a conv weight that BatchNorm follows."""
    weight = model.get_parameter(f"{name}.weight")
    m = torch.full((weight.shape[0],), 0.5, requires_grad=True)
    parameters = {f"{name}.weight": weight.detach() * m[:, None, None, None]}
    loss = torch.func.functional_call(copy.deepcopy(model).train(), parameters, (x,)).square().mean()
    (grad,) = torch.autograd.grad(loss, m)
    return grad


@every_rule
def test_soft_masks_are_soft_and_hard_masks_hard(rule: Rule) -> None:
    model, x = net("conv")
    prepared = pruned(model, at_once(rule, tau=1e-3), x)
    for name, mask in state(prepared).mask_items():
        weights = [prepared.get_parameter(read) for read in mask.parameters_read]
        soft = mask.values(*weights)
        assert ((soft > 0.01) & (soft < 0.99)).any(), name
        assert int((~mask.pruned(*weights)).sum()) == mask.pruned(*weights).numel() - counts(prepared)[name]


class Lengths(nn.Module):
    """Hidden channels are lengths of vectors; the gradient of a root is infinite at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.head = nn.Linear(5, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.vectors(x).unflatten(1, (8, 3)).square().sum(2).sqrt())


@pytest.mark.parametrize("forward", ["soft", "hard"])
def test_masks_leave_gradients_finite_where_a_root_follows(forward: Forward) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(start=0, epsilon=0.5), forward=forward)
    prepared = prepare(Lengths(), spec, x)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
        step(prepared)
    assert all(bool(parameter.isfinite().all()) for parameter in prepared.parameters())
    small = convert(prepared)
    assert small.get_parameter("head.weight").shape == (4, 4)
    assert small(x).allclose(prepared.eval()(x), atol=1e-6)


class Cycles(nn.Module):
    """Runs its layers twice, the first time without gradients, as recurrent reasoners do."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.only, self.out = nn.Linear(8, 8), nn.Linear(8, 5)
        self.detaches = detaches

    def cycle(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        if self.detaches:
            x = self.cycle(self.only(x)).detach()
        else:
            with torch.no_grad():
                x = self.cycle(self.only(x))
        return self.out(self.cycle(x))


@every_rule
def test_what_is_used_without_gradients_first_has_those_of_its_later_use(rule: Rule) -> None:
    """A mask made under `torch.no_grad()` would pass no gradient on."""
    grads: list[dict[str, Tensor | None]] = []
    outputs: list[Tensor] = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if isinstance(rule, Channels):
        rule = Channels(0.5, through_norms=True)
    for detaches in (False, True):
        torch.manual_seed(0)
        prepared = pruned(Cycles(detaches).double(), at_once(rule), x).train()
        outputs.append(prepared(x))
        outputs[-1].square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in prepared.named_parameters()})
    torch.testing.assert_close(*outputs)
    one, other = grads
    assert {name for name, grad in one.items() if grad is None} <= {"only.weight", "only.bias"}
    for name, grad in other.items():
        torch.testing.assert_close(one[name], grad, msg=name)
