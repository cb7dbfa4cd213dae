"""Buffers that a model replaces by other tensors."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from pdp_fx import Channels, PruneSpec
from pdp_fx.errors import TraceError
from pdp_fx.trace import trace
from tests.tracing.checks import exact, opaque


class Leaks(nn.Module):
    """A spiking neuron: its membrane goes on from call to call."""

    mem: Tensor

    def __init__(self, decides: bool = False, detaches: bool = False) -> None:
        super().__init__()
        self.register_buffer("mem", torch.zeros(4))
        self.decides, self.detaches = decides, detaches

    def reset(self) -> None:
        self.mem = torch.zeros_like(self.mem)

    def forward(self, x: Tensor) -> Tensor:
        if self.decides and float(x.detach().sum()) > 1e9:
            return x
        mean = x.mean(0)
        self.mem = 0.5 * self.mem + (mean.detach() if self.detaches else mean)
        return x * (1 + self.mem)


class Net(nn.Module):
    """What a model does with the neuron that it holds.

    Args:
        use: what it does.
        inner: the neuron.
    """

    def __init__(self, use: Callable[["Net", Tensor], Tensor], inner: Leaks | None = None) -> None:
        super().__init__()
        self.use, self.layer, self.norm = use, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.inner = Leaks() if inner is None else inner

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.layer(x))


def in_a_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(3):
        x = net.inner(x)
    return x


def reset_at_first(net: Net, x: Tensor) -> Tensor:
    net.inner.reset()
    return in_a_loop(net, x)


def reset_at_last(net: Net, x: Tensor) -> Tensor:
    x = net.inner(x)
    net.inner.reset()
    return x


def halved_between(net: Net, x: Tensor) -> Tensor:
    x = net.inner(x)
    net.inner.mem = net.inner.mem * 0.5
    return net.inner(x)


def with_what_was(net: Net, x: Tensor) -> Tensor:
    was = net.inner.mem
    return net.inner(x) + was


def counted(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        net.inner.mem = net.inner.mem + 1
    return x * net.inner.mem


def in_place_before(net: Net, x: Tensor) -> Tensor:
    net.inner.mem.mul_(2).add_(1)
    return net.inner(x)


def in_place_after(net: Net, x: Tensor) -> Tensor:
    x = net.inner(x)
    net.inner.mem = net.inner.mem.detach()
    net.inner.mem.add_(1)
    return x


def part_of_itself(net: Net, x: Tensor) -> Tensor:
    x = x + net.inner.mem
    net.inner.mem = (net.inner.mem + x.detach().mean(0)).flip(0)[:]
    return x


def statistics_before(net: Net, x: Tensor) -> Tensor:
    """What a layer of torch reads was replaced just before."""
    net.norm.running_mean = x.detach().mean(0)
    return net.norm(x)


def multiplied_after(net: Net, x: Tensor) -> Tensor:
    """Backward needs what was in the buffer before."""
    x = net.inner(x) * net.inner.mem.exp()
    was = net.norm.running_var
    assert was is not None
    net.norm.running_var = was * 0.5
    return x.relu() * was


def weighed(net: Net, x: Tensor) -> Tensor:
    """Backward needs a part of it, for the gradient of a factor that is trained."""
    for _ in range(2):
        net.inner.mem = net.layer.bias * net.inner.mem[:] + x.mean(0)
    return x + net.inner.mem


USES = (
    in_a_loop,
    reset_at_first,
    reset_at_last,
    halved_between,
    with_what_was,
    counted,
    in_place_before,
    in_place_after,
    part_of_itself,
    statistics_before,
    multiplied_after,
    weighed,
)


def goes_alike(gm: nn.Module, model: nn.Module, training: bool, calls: int = 4) -> None:
    """Both give the same in one call after another, and hold the same after each."""
    mine, theirs = copy.deepcopy(gm).train(training), copy.deepcopy(model).train(training)
    with torch.no_grad():
        for _ in range(calls):
            x = torch.randn(3, 4)
            torch.testing.assert_close(mine(x), theirs(x), rtol=0, atol=0)
            held = dict(mine.named_buffers())
            for name, buffer in theirs.named_buffers():
                torch.testing.assert_close(held[name], buffer, rtol=0, atol=0)


@pytest.mark.parametrize("use", USES)
def test_what_is_put_into_a_buffer_is_there_in_the_next_call(use: Callable[[Net, Tensor], Tensor]) -> None:
    model = Net(use)
    gm = exact(model, torch.randn(3, 4), torch.randn(5, 4))
    assert not opaque(gm)
    for training in (False, True):
        goes_alike(gm, model, training)


@pytest.mark.parametrize("use", [in_a_loop, reset_at_first, reset_at_last])
def test_what_a_part_that_is_kept_whole_finds_in_its_buffer_is_what_its_caller_has_put_there(
    use: Callable[[Net, Tensor], Tensor],
) -> None:
    model = Net(use, Leaks(decides=True, detaches=True))
    gm = exact(nn.Sequential(model), torch.randn(3, 4))
    assert opaque(gm)
    for training in (False, True):
        goes_alike(gm, nn.Sequential(model), training)


def test_a_part_that_is_kept_whole_is_given_no_gradient_by_a_buffer() -> None:
    def given(net: Net, x: Tensor) -> Tensor:
        net.inner.mem = x.mean(0)
        return net.inner(x)

    model = Net(given, Leaks(decides=True))
    with pytest.raises(TraceError, match="gives inner a tensor with gradients as buffer mem"):
        trace(model, torch.randn(3, 4))
    around = nn.Sequential(model)
    assert "0" in opaque(exact(around, torch.randn(3, 4)))


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_who_replaces_a_buffer_does_it_in_his_mode(inner: bool, outer: bool) -> None:
    class InTraining(Leaks):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mem = 0.5 * self.mem + x.detach().mean(0)
            return x + self.mem

    def raised(net: Net, x: Tensor) -> Tensor:
        net.inner.mem = net.inner.mem + 3
        return net.inner(x)

    model = Net(raised, InTraining())
    gm = exact(model, torch.randn(3, 4))
    for each in (gm, model):
        each.train(outer)
        each.get_submodule("inner").training = inner
    held: list[Tensor] = []
    for each in (copy.deepcopy(gm), copy.deepcopy(model)):
        for seed in range(3):
            torch.manual_seed(seed)
            each(torch.randn(3, 4))
        held.append(each.get_buffer("inner.mem"))
    torch.testing.assert_close(held[0], held[1], rtol=0, atol=0)
    assert inner != torch.equal(held[1], torch.full((4,), 9.0))


class Swaps(nn.Module):
    """In eval mode computes with averaged weights that it lends to its layer, and takes back."""

    average: Tensor

    def __init__(self, uses_before: bool) -> None:
        super().__init__()
        self.layer, self.uses_before = nn.Linear(4, 4), uses_before
        self.register_buffer("average", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.layer(x)
        before = self.layer.weight.data
        self.layer.weight.data = self.average.clone()
        y = self.layer(x)
        if self.uses_before:
            self.layer.weight.data = before
        return y


def test_what_a_tensor_held_before_its_data_was_set_is_not_what_it_holds() -> None:
    model = Swaps(uses_before=True)
    with pytest.raises(TraceError, match="uses what a tensor held before its `data` was set"):
        trace(model, torch.randn(3, 4))
    around = nn.Sequential(model)
    weight = model.layer.weight.detach().clone()
    assert "0" in opaque(exact(around, torch.randn(3, 4)))
    assert torch.equal(model.layer.weight, weight)
    gm = trace(Swaps(uses_before=False), torch.randn(3, 4)).eval()
    gm(torch.randn(3, 4))
    assert torch.equal(gm.get_parameter("layer.weight"), gm.get_buffer("average"))


class Rows(nn.Module):
    """Changes the numbers of rows that are a view of pictures in a batch of one, and a copy of more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        rows = y.permute(0, 2, 3, 1).reshape(-1, 4)
        rows.data = rows.data * 0.5
        return y + rows.mean()


def test_data_is_not_set_of_what_may_be_a_view() -> None:
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(TraceError, match="sets the `data` of what reshape gives, a view at some sizes only"):
        trace(Rows(), x)
    model = nn.Sequential(Rows())
    gm = exact(model, x)
    assert "0" in opaque(gm)
    assert torch.equal(gm(x[:1]), model(x[:1]))


class StartsEmpty(nn.Module):
    """Has nothing in its buffer at first, as a recurrent cell without a state."""

    state: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", None)

    def forward(self, x: Tensor) -> Tensor:
        self.state = x.mean(0) if self.state is None else 0.5 * self.state + x.mean(0)
        return x + self.state


class Empties(nn.Module):
    """Takes what the call before has left in the cell out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(4, 4), StartsEmpty()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = None
        return self.cell(self.cell(self.layer(x)))


class Grows(nn.Module):
    """A neuron whose state begins without a size."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.state = 0.9 * torch.zeros_like(x) + x
        return (self.state - 1).relu()


def test_channels_that_a_buffer_of_another_shape_keeps_are_said_to_be_kept_by_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Grows(), nn.Linear(6, 3), nn.Linear(3, 3))
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(0.5)), torch.randn(2, 4))
    (reason,) = [kept.why for kept in pdp_fx.explain(prepared).kept if kept.group == "0"]
    why = "Grows is kept whole: it puts a tensor of another shape, dtype or device into its buffer state"
    assert reason.startswith(why)


def test_a_buffer_that_is_emptied_keeps_the_module_that_does_so_whole() -> None:
    with pytest.raises(TraceError, match=r"keeps state \(None at times\) for its next call"):
        trace(Empties(), torch.randn(3, 4))
    model = nn.Sequential(Empties())
    gm = trace(model, torch.randn(3, 4))
    assert "state" in opaque(gm)["0"]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4)
            torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_a_part_that_is_kept_whole_has_one_buffer_under_all_its_names() -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__(in_a_loop, Leaks(decides=True, detaches=True))
            self.parts = nn.ModuleList([self.layer, self.inner])

    gm = exact(Listed(), torch.randn(3, 4))
    assert set(opaque(gm)) == {"inner"}
    gm(torch.randn(3, 4))
    state = gm.state_dict()
    assert torch.equal(state["inner.mem"], state["parts.1.mem"])
    assert state["inner.mem"].any()


def test_a_buffer_that_is_given_to_another_module_is_in_both() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.first, self.second = nn.Linear(4, 4), Leaks(), Leaks()

        def forward(self, x: Tensor) -> Tensor:
            self.second.mem = self.first.mem
            x = self.first(self.layer(x))
            self.second.mem.add_(1)
            return self.second(x)

    model = Gives()
    gm = exact(model, torch.randn(3, 4))
    for training in (False, True):
        goes_alike(gm, model, training)
