import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, Unstructured
from pdp_fx.errors import SpecError, TraceError
from pdp_fx.trace import trace
from pdp_fx.tracing.shells import is_shell
from tests.tracing.checks import Around, exact, opaque, targets


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return x


class Checks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        assert (x < 1e6).all(), "too large"
        if not torch.isfinite(x).all() or x.dim() > 3:
            raise ValueError("infinite")
        return x * 2


class ChecksNumbers(nn.Module):
    """Compares numbers that it takes out of tensors, some with sizes, and fails by them."""

    def forward(self, x: Tensor) -> Tensor:
        if x.argmax().item() >= x.numel():
            raise ValueError("no such place")
        if bool(torch.isinf(x).any()) or not -1e6 < x.sum().item() <= 1e6:
            raise ValueError("too large")
        if torch.isnan(x).any().item():
            raise ValueError("not a number")
        return x * 2


class UsesNumber(nn.Module):
    """A number from a tensor that is more than compared."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if x.sum().item() > 1e6 else 2)


class Pick(nn.Module):
    """Picks rows by their values, in a method that uses no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def pick(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = x[x[:, 0] > 0]
        if rows.shape[0] < 1:
            return x, None
        return rows.mean(0, keepdim=True).expand_as(x), rows

    def forward(self, x: Tensor) -> Tensor:
        mean, _ = self.pick(self.linear(x))
        return mean + x


class Match(nn.Module):
    """Decides by its data in a method of its own, which uses a norm, and a layer that forward calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.narrow = nn.Linear(4, 8)
        self.wide = nn.Linear(8, 12)
        self.inner = nn.Sequential(nn.BatchNorm1d(12), nn.Dropout(0.5))
        self.rare = nn.Linear(12, 12)

    def match(self, x: Tensor) -> Tensor:
        y = self.inner(self.shared(x))
        return self.rarely(y) if y.detach().sum() > 1e9 else 2 * y

    def rarely(self, y: Tensor) -> Tensor:
        return self.rare(y)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(self.narrow(x).relu()) + self.first(x)
        return self.last(self.match(self.shared(self.rare(hidden)).relu()))


class Looks(nn.Module):
    """Splits what its encoder makes as its data say, in a method of its own, and goes on with layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 4))
        self.narrow, self.out, self.both = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

    def look(self, x: Tensor) -> list[Tensor]:
        positive: Any = (x[:, 0] > 0).sum().tolist()
        return list(self.both(self.encoder(x)).split([positive, len(x) - positive]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.narrow(torch.cat(self.look(self.both(x)))).relu())


CAPTURED: list[Tensor] = []


def capture(module: nn.Module, args: Any, output: Tensor) -> None:
    CAPTURED.append(output)


class Captures(Looks):
    """Registers a hook in the first call of the method, which returns what the hook has seen."""

    hooked = False

    def look(self, x: Tensor) -> list[Tensor]:
        if not self.hooked:
            self.encoder.register_forward_hook(capture)
            self.hooked = True
        CAPTURED.clear()
        super().look(x)
        return CAPTURED[:1]


class Experts(nn.Module):
    """Sends rows through the layers that their first numbers choose, if more than one row chooses it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, i] > 0)
            if len(rows) > 1:
                out.index_add_(0, rows, expert(x[rows]))
        return out


class Dropping(Experts):
    """Drops what no expert has taken."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        kept = (out != 0).any(1).nonzero()
        return out[: len(kept)]


class Routed(nn.Module):
    """Goes through the one layer that the numbers choose, by an index or by a name."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.gate, self.by_name = nn.Linear(4, 3), by_name
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x.mean(0)).argmax()
        if self.by_name:
            return self.get_submodule(f"experts.{chosen}")(x)
        return self.experts[chosen](x)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_that_the_numbers_choose_out_of_a_list_is_kept_whole_with_it(by_name: bool) -> None:
    torch.manual_seed(0)
    gm = exact(Around(Routed(by_name)), *(torch.randn(6, 4) * 9 for _ in range(6)))
    assert "inner" in opaque(gm)


class Looking(nn.Module):
    """Looks into the memory of what it gets, or asks where that is."""

    def __init__(self, look: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return x * self.look(x.mean())


@pytest.mark.parametrize(
    "look", [lambda mean: mean.untyped_storage().tolist()[0], lambda mean: mean.untyped_storage()[0]]
)
def test_what_looks_into_the_memory_of_a_tensor_is_kept_whole(look: Any) -> None:
    gm = exact(Around(Looking(look)), *(torch.randn(6, 4) for _ in range(3)))
    assert opaque(gm)


def test_what_code_of_numpy_is_given_is_said() -> None:
    look = Looking(lambda mean: float(np.sqrt(np.asarray(mean.detach().abs(), dtype=np.float64))))
    gm = exact(Around(look), *(torch.randn(6, 4) for _ in range(3)))
    assert "makes an array of NumPy of a tensor" in opaque(gm)["inner"]


def test_what_asks_where_a_tensor_lies_is_not() -> None:
    gm = exact(
        Around(Looking(lambda mean: 2.0 if mean.untyped_storage().data_ptr() else 1.0)), torch.randn(6, 4)
    )
    assert not opaque(gm)


class Doubled(nn.Module):
    """Asks for sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).flatten(1) * 2


class Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * gradient * x**2


class Deciding(Cubed):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x**3 if x.sum() > 0 else x


class Decided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Deciding.apply(x))


class Cubes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Cubed.apply(x))


class Lottery(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        if self.source == "python":
            return x * 2 if random.choice([True, False]) else x
        return x + torch.from_numpy(np.random.rand(4).astype("float32"))


class Skips(nn.Module):
    """Draws lots in both modes, and goes by them in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Around(nn.ReLU()), Around(nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.randint(0, 1) or not self.training:
                x = layer(x)
        return x


class Cleans(nn.Module):
    """Writes to what a method is given, which returns it beside a mask if there is any need of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def clean(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        missing = x.isnan()
        x[missing] = 0
        return x, missing if missing.any() else None

    def forward(self, x: Tensor) -> Tensor:
        x, missing = self.clean(x)
        return self.linear(x) if missing is None else self.linear(x * 2)


def test_a_module_that_branches_on_its_data_stays_whole() -> None:
    x = torch.randn(2, 4)
    gm = exact(Around(Decides()), x, -x, torch.randn(3, 4))
    assert list(opaque(gm)) == ["inner"]
    assert opaque(gm)["inner"].startswith("branches on the numbers in a tensor (test_opaque.py:")
    assert gm.get_submodule("inner.linear") is not None


def test_only_the_innermost_module_stays_whole() -> None:
    gm = exact(Around(nn.Sequential(Around(Decides()), nn.Linear(4, 4))), torch.randn(2, 4))
    assert list(opaque(gm)) == ["inner.0.inner"]


def test_a_model_that_branches_itself_is_refused() -> None:
    with pytest.raises(TraceError, match=r"the forward of Decides itself: it branches .*test_opaque.py:\d+"):
        trace(Decides(), torch.randn(2, 4))


def test_a_check_stays_a_check() -> None:
    gm = exact(Around(Checks()), torch.randn(2, 4))
    assert not opaque(gm)
    assert targets(gm).count("_assert_scalar.default") == 3
    with pytest.raises(RuntimeError, match=r"the check at test_opaque.py:\d+ failed"):
        gm(torch.full((2, 4), torch.nan))


def test_a_check_of_numbers_from_tensors_stays_a_check() -> None:
    gm = exact(Around(ChecksNumbers()), torch.randn(2, 4))
    assert not opaque(gm)
    assert targets(gm).count("_assert_scalar.default") == 5
    for number in (1e9, math.nan, math.inf):
        with pytest.raises(RuntimeError, match=r"the check at test_opaque.py:\d+ failed"):
            gm(torch.full((2, 4), number))


class ChecksPlaces(nn.Module):
    """Decides by positions that it makes itself, and checks numbers in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        if not (places.diff() == 1).all() or (self.training and torch.isnan(x).any()):
            raise ValueError("cannot be")
        return self.linear(x) * places


@pytest.mark.parametrize("training", [False, True])
def test_checks_of_tensors_are_compiled_and_exported(training: bool) -> None:
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    gm = exact(Around(ChecksPlaces()), x, other).train(training)
    assert not opaque(gm)
    compiled = torch.compile(gm, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(gm, (x,)).module()
    torch.testing.assert_close([compiled(x), compiled(other), exported(x)], [gm(x), gm(other), gm(x)])
    nans = torch.full((2, 4), torch.nan)
    for form in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        if training:
            with pytest.raises(RuntimeError, match="the check at"):
                form(nans)
        else:
            form(nans)


def test_a_number_from_a_tensor_that_does_more_than_fail_is_no_check() -> None:
    assert list(opaque(exact(Around(UsesNumber()), torch.randn(2, 4)))) == ["inner"]


def test_a_method_that_uses_no_weights_stays_whole_alone() -> None:
    gm = exact(Around(Pick()), torch.randn(8, 4))
    assert list(opaque(gm)) == ["pick"]
    assert "inner.linear" in targets(gm)


def test_a_method_of_the_model_itself_stays_whole() -> None:
    model = Pick()
    x = torch.cat([torch.eye(4), -torch.eye(4)])
    gm = exact(model, x)
    assert list(opaque(gm)) == ["pick"]
    assert "linear" in targets(gm)


@pytest.mark.parametrize("given", [False, True])
def test_a_method_kept_whole_runs_the_layers_of_the_prepared_model_in_their_modes(given: bool) -> None:
    torch.manual_seed(0)
    model, x = Match().train(given).double(), torch.randn(8, 4, dtype=torch.float64)
    dense = copy.deepcopy(model)
    prepared = cast(Any, pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x))
    for made in (prepared, copy.deepcopy(prepared)):
        for training in (True, False):
            outputs: list[Tensor] = []
            for each in (copy.deepcopy(dense), copy.deepcopy(made)):
                torch.manual_seed(1)
                outputs += [each.train(training)(x), each.get_buffer("inner.0.running_mean")]
            assert torch.equal(outputs[0], outputs[2])
            assert torch.equal(outputs[1], outputs[3])
    frozen = prepared.train().get_submodule("inner").eval().get_submodule("0")
    before = frozen.running_mean.clone()
    assert torch.equal(prepared(x), prepared(x))
    assert torch.equal(frozen.running_mean, before)
    assert prepared.float()(x.float()).dtype == torch.float32


@pytest.mark.parametrize("rule", [Unstructured(0.5), Channels(0.5)])
def test_what_a_method_kept_whole_uses_itself_is_out_of_reach(rule: Unstructured | Channels) -> None:
    torch.manual_seed(0)
    model, x = Match().double(), torch.randn(8, 4, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=Schedule(0, 1.0)), x)
    pdp_fx.step(prepared.train())
    prepared(x)
    assert "match" in str(pdp_fx.explain(prepared))
    converted = pdp_fx.convert(prepared.eval())
    torch.testing.assert_close(converted(x), prepared(x), rtol=0.0, atol=1e-12)
    assert (converted.get_parameter("shared.weight") != 0).all()
    # The example does not take the branch in which the method uses it.
    assert (converted.get_parameter("rare.weight") != 0).all()
    narrow = converted.get_parameter("narrow.weight")
    assert narrow.shape[0] == 4 if isinstance(rule, Channels) else (narrow == 0).any()
    model.train()
    torch.testing.assert_close(converted(x), prepared(x), rtol=0.0, atol=1e-12)


class Chooses(nn.Module):
    """A method of the model itself decides by its data which layers, parameters and buffers it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.chosen, self.down = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.rand(8))

    def choose(self, x: Tensor) -> Tensor:
        return self.chosen(x if x.detach().sum() > 0 else -x) * self.scale + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.choose(self.up(x) * self.scale).relu() + self.shift)


def test_what_a_method_of_the_model_uses_belongs_to_the_converted_model() -> None:
    torch.manual_seed(0)
    model, x = Chooses().double(), torch.randn(8, 4, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    pdp_fx.step(prepared.train())
    prepared(x)
    converted = pdp_fx.convert(prepared.eval())
    wanted = prepared(x)
    for made in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(made(x), wanted, rtol=0.0, atol=1e-12)
    own = {name.removeprefix("model.") for name in converted.state_dict()}
    assert own == set(model.state_dict())
    assert len(converted.state_dict()) == len(own)
    assert len(list(converted.parameters())) == len(list(model.parameters()))
    zeroed = copy.deepcopy(converted)
    with torch.no_grad():
        for tensor in (*zeroed.parameters(), *zeroed.buffers()):
            tensor.fill_(0.1)
    assert not torch.equal(zeroed(x), wanted)
    torch.testing.assert_close(converted(x), wanted, rtol=0.0, atol=1e-12)
    zeroed.load_state_dict(converted.state_dict())
    torch.testing.assert_close(zeroed(x), wanted, rtol=0.0, atol=1e-12)
    # The buffers are new tensors after that, and those of the graph are those of the method.
    torch.testing.assert_close(zeroed.float()(x.float()), wanted.float())
    zeroed.get_buffer("model.scale").zero_()
    shift = zeroed.get_parameter("model.shift")
    flat = zeroed.get_submodule("down")(shift.relu() + shift)
    torch.testing.assert_close(zeroed(x.float()), flat.expand(8, 3))


def looking() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Looks(), nn.Linear(4, 4)).double(), torch.randn(8, 4, dtype=torch.float64)


def test_a_method_of_a_module_that_uses_its_layers_stays_whole_alone() -> None:
    model, x = looking()
    gm = exact(model, x)
    assert list(opaque(gm)) == ["look"]
    assert {"0.both", "0.narrow", "0.out", "1"} <= set(targets(gm))
    assert is_shell(gm.get_submodule("0"))


def test_hooks_that_a_method_kept_whole_registers_stay_with_the_graph() -> None:
    gm = exact(nn.Sequential(Captures(), nn.Linear(4, 4)), torch.randn(8, 4))
    assert list(opaque(gm)) == ["look"]


def test_layers_that_run_in_a_method_kept_whole_only_are_pruned_by_single_weights() -> None:
    model, x = looking()
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    pdp_fx.step(prepared.train())
    prepared(x).sum().backward()
    converted = pdp_fx.convert(copy.deepcopy(prepared).eval())
    for path in ("0.encoder.0", "0.encoder.3", "0.narrow"):
        assert prepared.get_parameter(f"{path}.weight").grad is not None
        zeros = converted.get_parameter(f"{path}.weight") == 0
        assert zeros.sum() > 0
    # Another use of its weight is in the graph, where the method does not see its mask.
    assert (converted.get_parameter("0.both.weight") != 0).all()
    dense = prepared.eval()(x)
    torch.testing.assert_close(converted(x), dense, rtol=0.0, atol=1e-12)
    with torch.no_grad():
        prepared.get_parameter("0.encoder.0.weight").zero_()
    assert not torch.equal(prepared(x), dense)
    torch.testing.assert_close(converted(x), dense, rtol=0.0, atol=1e-12)
    assert converted.state_dict().keys() == model.state_dict().keys()
    copied = pickle.loads(pickle.dumps(converted)).float()
    torch.testing.assert_close(copied(x.float()), dense.float())
    assert all(module.training for module in copied.train().modules())


def test_a_method_kept_whole_leaves_channels_around_it_to_be_removed() -> None:
    model, x = looking()
    prepared = pdp_fx.prepare(model, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), x)
    pdp_fx.step(prepared.train())
    prepared(x).sum().backward()
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_parameter("0.narrow.weight").shape[0] == 4
    assert converted.get_parameter("0.encoder.0.weight").shape[0] == 12
    torch.testing.assert_close(converted(x), prepared(x), rtol=0.0, atol=1e-12)


class Couples(nn.Module):
    """Goes by its data in a method that may use its net."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Wide(), nn.Linear(4, 4)

    def spline(self, x: Tensor, by: Tensor) -> Tensor:
        return self.net(by) if x.sum() > 0 else x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spline(x, self.net(x)))


class CouplesByNumber(Couples):
    """The method asks the net for a number only, as in neural spline flows."""

    def spline(self, x: Tensor, by: Tensor) -> Tensor:
        return x * by / self.net.hidden if x.sum() > 0 else x


class Wide(nn.Sequential):
    """Two layers that say how wide they are."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.hidden = 8


class CouplesByKind(Couples):
    """The method asks only whether it has a net, and of which kind."""

    def spline(self, x: Tensor, by: Tensor) -> Tensor:
        by = by if self.net is not None and isinstance(self.net, Wide) else x  # pyright: ignore[reportUnnecessaryComparison, reportUnnecessaryIsInstance]
        by = by / self.net.hidden if hasattr(self.net, "hidden") and len(self.net) > 2 else by
        return x * by if x.sum() > 0 else x


@pytest.mark.parametrize("couples", [CouplesByNumber, CouplesByKind])
def test_a_method_that_asks_a_part_for_a_number_or_its_kind_uses_none_of_its_weights(
    couples: type[Couples],
) -> None:
    x = torch.randn(3, 4).double()
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0))
    prepared = pdp_fx.prepare(nn.Sequential(couples().double()), spec, x)
    pdp_fx.step(prepared.eval())
    converted = pdp_fx.convert(prepared)
    assert converted.get_parameter("0.net.0.weight").shape == (4, 4)
    for each in (x, -x, torch.randn(5, 4).double()):
        torch.testing.assert_close(converted(each), prepared(each), rtol=0.0, atol=1e-12)
    with pytest.raises(SpecError, match="which spline uses inside itself"):
        pdp_fx.prepare(nn.Sequential(Couples().double()), spec, x)


def test_what_a_method_changes_and_returns_beside_something_else_is_a_part_of_its_result() -> None:
    gm = exact(nn.Sequential(Cleans(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert list(opaque(gm)) == ["clean"]
    with pytest.raises(AssertionError, match="clean returned something else"):
        gm(torch.full((2, 4), torch.nan))


def test_something_opaque_that_returns_another_structure_fails() -> None:
    model = Pick()
    nn.init.eye_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    gm = exact(model, torch.ones(2, 4))
    with pytest.raises(AssertionError, match="returned something else than when it was traced"):
        gm(-torch.ones(2, 4))


def test_what_data_are_written_into_keeps_a_size_that_can_be_asked_for() -> None:
    gm = exact(nn.Sequential(Around(Experts()), Doubled()), torch.randn(5, 4), torch.randn(3, 4))
    assert list(opaque(gm)) == ["0.inner"]


def test_a_size_that_was_the_same_by_chance_is_checked() -> None:
    gm = trace(nn.Sequential(Dropping(), Doubled()), torch.ones(2, 4)).eval()
    assert list(opaque(gm)) == ["0"]
    with pytest.raises(AssertionError, match="returned something else than when it was traced"):
        gm(-torch.ones(2, 4))


def test_an_autograd_function_is_one_step_with_its_own_derivative() -> None:
    x = torch.randn(2, 4)
    model = Around(Cubes())
    gm = exact(model, x)
    assert not opaque(gm)
    assert [node.name for node in gm.graph.nodes if node.name == "cubed"]
    for either in (model, gm):
        either.train()
    wanted, got = (torch.autograd.grad(m(x).sum(), model.before.weight)[0] for m in (model, gm))
    assert torch.equal(wanted, got)
    plain = torch.autograd.grad(model.after(model.before(x) ** 3).sum(), model.before.weight)[0]
    assert not torch.allclose(got, plain)


def test_an_autograd_function_that_decides_by_numbers_keeps_its_module_whole() -> None:
    gm = exact(Around(Decided()), torch.randn(2, 4))
    assert "looks at numbers in the autograd function Deciding" in opaque(gm)["inner"]


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_random_numbers_from_elsewhere_keep_their_module_whole(source: str) -> None:
    gm = exact(Around(Lottery(source)), torch.randn(2, 4))
    assert "random numbers" in opaque(gm)["inner"]
    with pytest.raises(TraceError, match="random numbers"):
        trace(Lottery(source), torch.randn(2, 4))


def test_who_draws_lots_stays_whole_not_the_layer_it_calls_next() -> None:
    gm = exact(nn.Sequential(Skips(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert list(opaque(gm)) == ["0"]
    with pytest.raises(TraceError, match="forward of Skips itself: it draws random numbers outside torch"):
        trace(Skips(), torch.randn(2, 4))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_traced_into(reentrant: bool) -> None:
    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    gm = exact(Saves(), torch.randn(2, 4).requires_grad_())
    assert {"part.0", "part.1"} <= set(targets(gm))


def test_a_model_that_skips_work_unless_compiled_is_traced_as_compiled() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if torch.compiler.is_compiling() or not mask.all():
                x = x * mask
            return self.linear(x)

    model = Masked()
    gm = trace(model, (torch.randn(2, 4), torch.ones(2, 4)))
    assert not opaque(gm)
    inputs = torch.randn(2, 4), torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 1]])
    assert torch.equal(gm(*inputs), model(*inputs))


def test_an_encoder_is_traced_without_a_look_at_its_masks() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    mask, padded = nn.Transformer.generate_square_subsequent_mask(3), torch.zeros(2, 3)
    x = torch.randn(2, 3, 4)
    gm = trace(model, {"src": x, "mask": mask, "src_key_padding_mask": padded})
    assert not opaque(gm)
    for other in (mask, mask.T, torch.zeros(3, 3)):
        for cut_off in (padded, torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])):
            call = {"src": x, "mask": other, "src_key_padding_mask": cut_off}
            torch.testing.assert_close(gm(**call), model(**call))


def test_an_encoder_of_padded_sentences_is_traced_as_it_trains() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    padded = torch.tensor([[False, False, True], [False, False, False]])
    gm = trace(model, {"src": torch.randn(2, 3, 4), "src_key_padding_mask": padded})
    assert not opaque(gm)
    for cut_off in (padded, ~padded[[1, 1]], padded.flip(0)):
        call = {"src": torch.randn(2, 3, 4), "src_key_padding_mask": cut_off}
        torch.testing.assert_close(gm(**call), model(**call), equal_nan=True)


def test_tracing_ends_when_an_opaque_module_gets_what_a_graph_cannot_hold() -> None:
    class Takes(nn.Module):
        def forward(self, x: Tensor, how: object) -> Tensor:
            return x if x.sum() > 0 else -x

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.takes = Takes()

        def forward(self, x: Tensor) -> Tensor:
            return self.takes(x, object())

    gm = exact(Around(Passes()), torch.randn(2, 4))
    assert "passes a object, which a graph cannot hold" in opaque(gm)["inner"]


def gated_by_half(x: Tensor, width: int) -> Tensor:
    return torch.tanh(x[:, :width]) * torch.sigmoid(x[:, width:])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.script = nn.Linear(4, 4), torch.jit.script(gated_by_half)

    def forward(self, x: Tensor) -> Tensor:
        return self.script(self.linear(x), x.shape[1] // 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_functions_of_torch_script_are_followed_by_their_code() -> None:
    model, x = Gated(), torch.randn(3, 4)
    gm = trace(model, x[:2])
    assert targets(gm)[-1] == "mul"
    assert not opaque(gm)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_code_that_does_another_thing_than_its_script_is_refused() -> None:
    model = Gated()
    setattr(model.script, "_torchdynamo_inline", lambda x, width: x[:, width:])  # noqa: B010
    with pytest.raises(TraceError, match="TorchScript does not compute what the Python of <lambda> does"):
        trace(model, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_a_part_that_torchscript_has_compiled_stays_whole() -> None:
    model = Around(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    gm = exact(model, torch.randn(2, 4), torch.randn(3, 4))
    assert "inner" in targets(gm)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("training", [False, True])
def test_a_scripted_part_keeps_its_mode_and_its_statistics(training: bool) -> None:
    model = Around(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))).train(training)
    x, before = torch.randn(5, 4), {key: value.clone() for key, value in model.state_dict().items()}
    prepared = pdp_fx.prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    assert [module.training for module in model.modules()] == [training] * 6
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert isinstance(prepared.get_submodule("inner.1"), torch.jit.ScriptModule)
    with pytest.raises(AttributeError, match="has no attribute `7`"):
        prepared.get_submodule("inner.7")
    pdp_fx.step(prepared)
    assert torch.equal(pdp_fx.convert(prepared)(x), prepared.eval()(x))


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.cumsum(0))(x)


def test_a_part_that_maps_over_a_batch_stays_whole() -> None:
    gm = exact(Around(Mapped()), torch.randn(2, 4), torch.randn(3, 4))
    assert "torch.vmap" in opaque(gm)["inner"]


class DecidesOften(nn.Module):
    """Many parts that decide by their data; remembers how often it was run."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(Decides() for _ in range(parts)))
        self.last, self.runs = nn.Linear(4, 2), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        return self.last(self.parts(x))


def test_one_run_finds_all_parts_that_decide() -> None:
    runs: dict[int, int] = {}
    for parts in (2, 7):
        model = DecidesOften(parts)
        gm = trace(model, torch.randn(3, 4))
        runs[parts] = model.runs[0]
        reasons = opaque(gm)
        assert list(reasons) == [f"parts.{place}" for place in range(parts)]
        for reason in reasons.values():
            assert reason.startswith("branches on the numbers in a tensor (test_opaque.py:")
    assert runs[2] == runs[7]
    exact(DecidesOften(3), torch.randn(3, 4))


def test_a_method_is_kept_whole_whatever_it_calls_its_module() -> None:
    class Decided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def signed(me, x: Tensor) -> Tensor:  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]
            return x if x.sum() > 0 else -x

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.signed(self.linear(x)), x, use_reentrant=False)

    gm = exact(Decided(), torch.randn(2, 4).requires_grad_())
    assert set(opaque(gm)) == {"signed"}


class TellsItself(nn.Module):
    """Tells a method by an attribute what to do, and the method branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.limit = x.shape[0] * 2
        return self.linear(self.limited(x))

    def limited(self, x: Tensor) -> Tensor:
        return x / 2 if x.sum() > self.limit else x


def test_a_module_whose_method_reads_what_another_sets_stays_whole() -> None:
    gm = exact(Around(TellsItself()), torch.rand(3, 4), torch.rand(5, 4) * 100)
    (name,) = opaque(gm)
    assert isinstance(gm.get_submodule(name), TellsItself)


class Nests(nn.Module):
    """Makes a nested tensor of the rows of a batch."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer, self.layout = nn.Linear(4, 4), layout

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.as_nested_tensor(list(x.unbind(0)), layout=self.layout)
            return torch.nested.to_padded_tensor(self.layer(nested), 0.0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_what_makes_nested_tensors_stays_whole(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Nests(layout)).train()
    gm = exact(model, torch.randn(2, 3, 4), torch.randn(4, 3, 4))
    assert opaque(gm)["1"].startswith("makes a nested tensor")
    with pytest.raises(TraceError, match="it makes a nested tensor"):
        trace(model[1], torch.randn(2, 3, 4))
    assert all(module.training for module in model.modules())


def test_what_convert_returns_of_an_autograd_function_can_be_prepared_again() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), Cubes(), nn.Linear(8, 4)), torch.randn(3, 4)
    for width in (4, 2):
        prepared = pdp_fx.prepare(net, PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0)), x)
        prepared(x).sum().backward()
        pdp_fx.step(prepared)
        net = pdp_fx.convert(prepared)
        assert net.get_parameter("0.weight").shape == (width, 4)
        torch.testing.assert_close(net(x), prepared.eval()(x))


class Branching(nn.Module):
    """Chooses one of two functions by what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return chosen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_operators_on_functions_are_refused() -> None:
    with pytest.raises(TraceError, match="the model calls cond, which is given functions|in cond_op_dense"):
        trace(Around(Branching()), torch.randn(2, 4))


class SavesAndLoads(nn.Module):
    """Copies a tensor by way of a file in memory, which numbers that are followed do not survive."""

    def forward(self, x: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(x.detach(), file)
        file.seek(0)
        return x + torch.load(file)


class FailsIfWatched(nn.Module):
    """Fails while somebody listens to torch functions, also as a whole."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._len_torch_function_stack():
            raise KeyError("x")
        return x * 2


def test_what_fails_only_while_it_is_recorded_is_kept_whole_or_refused() -> None:
    gm = exact(Around(SavesAndLoads()), torch.randn(2, 4), torch.randn(3, 4))
    assert opaque(gm)["inner"].startswith("fails while it is recorded: UnpicklingError: Weights only load")
    why = "itself: it fails while it is recorded: UnpicklingError"
    with pytest.raises(TraceError, match=why):
        trace(SavesAndLoads(), torch.randn(2, 4))
    why = "cannot trace module 'inner': it fails while it is recorded: KeyError: 'x'"
    with pytest.raises(TraceError, match=why):
        trace(Around(FailsIfWatched()), torch.randn(2, 4))


class Restores(nn.Module):
    """Computes with another weight for a while, and registers its own anew when its modules are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.more = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def restore(self) -> None:
        own = self.base.weight
        del self.base.weight
        self.base.register_parameter("weight", nn.Parameter(own.data))

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        return super().named_modules(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        own = self.base.weight.data
        del self.base.weight
        self.base.weight = cast(nn.Parameter, own + self.more)
        try:
            return self.base(x)
        finally:
            del self.base.weight
            self.base.weight = cast(nn.Parameter, own)


class HoldsRestores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Restores(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def test_a_part_whose_modules_are_listed_by_a_method_of_its_own_is_refused_for_what_it_does() -> None:
    model, x = HoldsRestores(), torch.randn(2, 4)
    model(x)
    with pytest.raises(TraceError, match="lends tensors to inner, which cannot be looked into"):
        trace(model, x)
