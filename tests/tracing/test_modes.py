import copy
import gc
import io
import weakref
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pdp_fx import NM, Channels, PruneSpec, Schedule, Unstructured, convert, prepare, step
from pdp_fx.errors import TraceError
from pdp_fx.spec import Rule
from pdp_fx.trace import trace
from pdp_fx.tracing.modes import When
from tests.tracing.checks import exact, opaque, targets


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        return x * keep / 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop_path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.linear(x))


class Heads(NamedTuple):
    main: Tensor
    auxiliary: Tensor


class Auxiliary(nn.Module):
    """A second head in training only, with BatchNorm, dropout and an in-place activation in it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.main = nn.Linear(4, 2)
        self.side = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor | Heads:
        h = self.trunk(x)
        if self.training:
            return Heads(self.main(h), F.relu(self.side(h), inplace=True))
        return self.main(h)


class MoreGroups(nn.Module):
    """Two groups of queries in training, which a split tells apart, and one in eval mode (Group DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.layer = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.layer(self.queries if self.training else self.queries[:3])
        return x + torch.stack([part.sigmoid().sum(0) for part in queries.split(3)]).sum(0)


def test_a_split_may_have_more_parts_in_one_mode() -> None:
    assert not opaque(exact(MoreGroups(), torch.randn(2, 4), torch.randn(5, 4)))


class Counting(nn.BatchNorm1d):
    """Like the BatchNorm layers of timm: its own forward, which counts batches in training."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


def test_leaf_layers_follow_the_mode() -> None:
    exact(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)), torch.randn(2, 3, 8, 8))


def test_a_training_flag_of_a_function_is_read_from_its_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x), 0.5, training=self.training)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    for model, names in ((Net(), ["linear", "mode"]), (Outer(), ["inner.linear", "inner"])):
        gm = exact(model, torch.randn(2, 4), torch.randn(3, 4))
        assert targets(gm) == [*names, "getattr", "dropout"]


def test_one_part_may_be_in_another_mode() -> None:
    model = nn.Sequential(Block(), Block())
    gm = exact(model, torch.randn(8, 4))
    gm.train()
    gm.get_submodule("1").eval()
    model.train()
    model[1].eval()
    x = torch.randn(8, 4)
    torch.manual_seed(3)
    wanted = model(x)
    torch.manual_seed(3)
    assert torch.equal(gm(x), wanted)


def test_a_number_that_differs_by_mode_is_picked() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x), 0.5 if self.training else 0.0)

    gm = exact(Net(), torch.randn(2, 4))
    assert targets(gm) == ["linear", "mode", "getattr", "getitem", "dropout"]


def test_drop_path_without_weights_stays_whole() -> None:
    gm = exact(nn.Sequential(Block(), Block()), torch.randn(8, 4), torch.randn(3, 4))
    assert opaque(gm) == dict.fromkeys(("0.drop_path", "1.drop_path"), "acts differently in training mode")


def test_an_auxiliary_head_is_traced_into() -> None:
    gm = exact(Auxiliary(), torch.randn(4, 4), torch.randn(6, 4))
    assert {"side.0", "side.1", "side.3"} <= set(targets(gm))
    assert not any(isinstance(node.target, When) for node in gm.graph.nodes)


class AuxiliaryOfPictures(nn.Module):
    """A second head in training only, whose convolution needs larger pictures than the main head does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.side = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 5)
        self.norm, self.unset = nn.BatchNorm2d(4), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.trunk(x).relu()
        if self.training:
            side = F.relu(self.norm(self.side(h)), inplace=True).mean((2, 3)) + h.shape[0]
            return self.main(h), F.dropout(side)
        return self.main(h) + self.unset(h).clamp_(min=0)


@pytest.mark.parametrize("rule", [Channels(0.5), Unstructured(0.5), NM(2, 4)])
def test_eval_mode_leaves_out_what_training_alone_computes(rule: Rule) -> None:
    model = AuxiliaryOfPictures().eval()
    prepared = prepare(model, PruneSpec(rule, schedule=Schedule(0, 1.0)), torch.randn(2, 3, 9, 9)).eval()
    assert "if self.mode.training:" in prepared.code
    small = torch.randn(3, 3, 4, 4)
    stored = io.BytesIO()
    torch.save(prepared, stored)
    stored.seek(0)
    for one in (prepared, copy.deepcopy(prepared), torch.load(stored, weights_only=False)):
        torch.testing.assert_close(one(small), model(small), rtol=0, atol=0)
    step(prepared.train())
    assert prepared(torch.randn(2, 3, 9, 9))[1].any()
    torch.testing.assert_close(convert(prepared)(small), prepared.eval()(small), rtol=1e-4, atol=1e-5)


def test_what_one_mode_leaves_out_is_compiled_in_one_graph() -> None:
    model = AuxiliaryOfPictures()
    gm = exact(model, torch.randn(2, 3, 9, 9), torch.randn(3, 3, 8, 8))
    compiled = torch.compile(gm, fullgraph=True, backend="aot_eager")
    for training, x in ((True, torch.randn(2, 3, 9, 9)), (False, torch.randn(2, 3, 4, 4))):
        for one in (model, gm):
            one.train(training)
        torch.manual_seed(0)
        wanted = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), wanted)


class ChangedWhereBothTrain(nn.Module):
    """A tensor of training mode that is changed if another module trains, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.side, self.after = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.before(x)
        if not self.training:
            return self.after(h)
        side = h * 2
        changed = side.relu_() if self.side.training else h
        return self.after(changed), side


def test_what_is_changed_under_another_flag_is_not_left_out() -> None:
    gm = exact(ChangedWhereBothTrain(), torch.randn(3, 4), torch.randn(5, 4))
    assert any(
        "together" in str(node.args[1])
        for node in gm.graph.find_nodes(op="call_function", target=torch._assert)
    )


def test_steps_that_fail_in_the_other_mode_are_called_in_their_own() -> None:
    gm = exact(MoreGroups(), torch.randn(2, 4))
    assert any(isinstance(node.target, When) for node in gm.graph.nodes)


def test_a_buffer_counted_in_training_only() -> None:
    gm = exact(nn.Sequential(nn.Linear(4, 4), Counting(4)), torch.randn(4, 4))
    assert [node.target.function for node in gm.graph.nodes if isinstance(node.target, When)] == ["add_"]


def test_random_numbers_drawn_in_training_only() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                noise = torch.randn_like(x).mul_(0.1)
                x = x + noise
            return self.linear(x)

    exact(Noisy(), torch.randn(2, 4), torch.randn(3, 4))


def test_random_numbers_nobody_uses_are_drawn_all_the_same() -> None:
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(())
            x.new_empty(3).bernoulli_()
            return self.linear(x)

    gm = exact(Wasteful(), torch.randn(2, 4))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    x = torch.randn(2, 4)
    torch.manual_seed(0)
    Wasteful().eval()(x)
    gm(x)
    assert "bernoulli_" in targets(gm)


def test_steps_of_eval_mode_only() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            one, two = self.one(x), self.two(x)
            if self.training:
                return one, two
            return (one + two) / 2

    exact(Distilled(), torch.randn(2, 4), torch.randn(3, 4))


def test_targets_are_needed_in_training_only() -> None:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            y = self.linear(x)
            if self.training and labels is not None:
                return F.cross_entropy(y, labels)
            return y

    gm = exact(Losses(), (torch.randn(2, 4), torch.tensor([0, 1])))
    assert gm.eval()(torch.randn(5, 4)).shape == (5, 2)


@pytest.mark.parametrize("gives_itself", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_train_override_is_followed(gives_itself: bool, recorded: bool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def train(self, mode: bool = True) -> Any:
            """Some libraries give nothing back here."""
            super().train(mode)
            self.norm.eval()
            return self if gives_itself else None

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    model, x = Frozen(), torch.randn(4, 4)
    gm = exact(model, x) if recorded else trace(model)
    gm.train()
    model.train()
    assert not gm.get_submodule("norm").training
    assert torch.equal(gm(x), model(x))
    prepared = prepare(model, PruneSpec(Unstructured(0.5), schedule=Schedule(0, 1.0)), x)
    step(prepared)
    prepared.eval()
    torch.testing.assert_close(convert(prepared)(x), prepared(x))


class ChangesWhenRecorded(nn.Module):
    """Does something else while somebody listens to torch functions."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch._C._len_torch_function_stack() else x * 3


def test_a_model_that_does_something_else_while_it_is_recorded_is_refused() -> None:
    with pytest.raises(TraceError, match="not exact"):
        trace(ChangesWhenRecorded(), torch.ones(2))


class Cached(nn.Module):
    """Keeps a table made of its weight for as long as it is in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.randn(4)), list[Tensor]()

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.kept = []
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.weight.exp()
        self.kept = self.kept or [self.weight.exp()]
        return x * self.kept[0]


def test_what_was_kept_from_an_earlier_evaluation_is_no_constant() -> None:
    model = Cached().eval()
    model(torch.ones(4))
    gm = trace(model, torch.ones(4))
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(gm.eval()(torch.ones(4)), model.weight.exp())


class Discards(nn.Module):
    """Normalises by a function, whose result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        F.batch_norm(h, self.norm.running_mean, self.norm.running_var, training=self.training)
        return h


def test_running_statistics_follow_what_is_normalised_for_nobody() -> None:
    exact(Discards(), torch.randn(5, 4), torch.randn(3, 4))


class SetsModes(nn.Module):
    """Sets the mode of a layer as it runs: its statistics stay, or it drops in evaluation, too."""

    def __init__(self, training: bool, restores: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.mode, self.restores = training, restores

    def forward(self, x: Tensor) -> Tensor:
        layer = self.drop if self.mode else self.norm
        before = layer.training
        if self.mode:
            layer.train()
        else:
            layer.eval()
        x = layer(self.linear(x))
        if self.restores:
            layer.train(before)
        return x


class SetsLate(SetsModes):
    """Runs the layer before it sets its mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("restores", [False, True])
def test_what_a_model_puts_into_eval_mode_as_it_runs_stays_in_it(restores: bool) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 4), SetsModes(False, restores), nn.BatchNorm1d(4)),
        torch.randn(5, 4),
    )
    gm = exact(model, x, torch.randn(3, 4))
    assert not opaque(gm)
    gm.train()
    assert [gm.get_submodule(path).training for path in ("1.norm", "1.drop", "2")] == [False, True, True]
    before = model.get_buffer("1.norm.running_mean").clone()
    gm(x)
    assert torch.equal(gm.get_buffer("1.norm.running_mean"), before)


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("made", [SetsModes, SetsLate])
def test_a_module_that_sets_modes_otherwise_as_it_runs_stays_whole(
    made: type[SetsModes], restores: bool
) -> None:
    training = made is SetsModes
    model = nn.Sequential(nn.Linear(4, 4), made(training, restores))
    gm = exact(model, torch.randn(5, 4), torch.randn(3, 4))
    mode = "'drop' into training mode" if training else "'norm' into eval mode"
    assert opaque(gm)["1"].startswith(f"puts module '1.{mode[1:]} as it runs")
    with pytest.raises(TraceError, match=f"it puts module {mode} as it runs .*test_modes.py"):
        trace(model[1], torch.randn(5, 4))


def test_modes_that_are_set_to_what_they_are_change_nothing() -> None:
    class Frozen(SetsModes):
        def train(self, mode: bool = True) -> Self:
            super().train(mode)
            self.norm.eval()
            return self

    assert not opaque(exact(Frozen(training=False, restores=False), torch.randn(5, 4), torch.randn(3, 4)))


class AsksChild(nn.Module):
    """Does by a function what a layer would do, in the mode of that layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x, norm = self.linear(x), self.norm
        if self.how == "normalises":
            x = F.batch_norm(x, norm.running_mean, norm.running_var, training=norm.training)
        elif self.how == "drops":
            x = F.dropout(x, 0.5, norm.training)
        elif self.how == "branches":
            x = x * 3 if norm.training else x
        elif self.how == "tells":
            x = told(x, norm.training)
        return self.last(x)


def told(x: Tensor, training: bool) -> Tensor:
    return x + torch.rand_like(x) if training else x


@pytest.mark.parametrize("frozen", ["norm", "linear", ""])
@pytest.mark.parametrize("how", ["normalises", "drops", "branches", "tells"])
def test_a_child_that_is_asked_for_its_mode_decides_by_its_own(how: str, frozen: str) -> None:
    model, x = AsksChild(how), torch.randn(5, 4)
    gm = exact(model, x)
    for training in (True, False):
        results: list[Tensor] = []
        for one in (model, gm):
            one.train(training).get_submodule(frozen).eval()
            torch.manual_seed(0)
            results.append(one(x))
        assert torch.equal(*results)


class Told(nn.Module):
    """Is told by its caller whether to drop."""

    def forward(self, x: Tensor, drops: bool) -> Tensor:
        return F.dropout(x, 0.5, drops)


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Told()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.training)


def test_a_module_that_is_told_the_mode_goes_by_that_of_its_caller() -> None:
    gm = exact(Tells(), torch.ones(50, 4)).train()
    gm.get_submodule("inner").eval()
    assert not torch.equal(gm(torch.ones(50, 4)), torch.ones(50, 4))


class AsksBoth(AsksChild):
    """Does one thing by its own mode and another by that of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.rand_like(x) if self.training else x


def test_modules_that_decide_together_have_to_be_in_one_mode() -> None:
    gm = exact(AsksBoth("drops"), torch.randn(5, 4))
    gm.train().get_submodule("norm").eval()
    with pytest.raises(AssertionError, match="the model and norm decide together what happens in training"):
        gm(torch.randn(5, 4))


class AsksTwo(nn.Module):
    """Asks two modules for their flags, in a way that neither mode shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.layer, self.drop = factor, nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.layer(x))
        return x * self.factor if self.training and not self.drop.training else x


def test_modules_that_do_something_else_in_two_modes_have_to_be_in_one() -> None:
    gm, x = exact(AsksTwo(2.0), torch.randn(3, 4)), torch.randn(3, 4)
    gm.train().get_submodule("drop").eval()
    with pytest.raises(AssertionError, match="the model and drop decide together what happens in training"):
        gm(x)


def test_modules_that_decide_nothing_together_may_be_in_two_modes() -> None:
    model, x = AsksTwo(1.0), torch.randn(3, 4)
    gm = exact(model, x)
    for net in (model, gm):
        net.train().get_submodule("drop").eval()
    assert torch.equal(gm(x), model(x))


class IsTold(nn.Module):
    """Does one thing if its caller is in the mode that it is told, and another if only itself is."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.layer = factor, nn.Linear(4, 4)

    def forward(self, x: Tensor, rate: float, told: bool) -> Tensor:
        x = F.dropout(self.layer(x), rate, self.training)
        return x * self.factor if self.training and not told else x


class TellsNumbers(nn.Module):
    """Tells two modules its mode and a number that may go by it."""

    def __init__(self, factor: float, in_eval: float) -> None:
        super().__init__()
        self.rates = {False: in_eval, True: 0.5}
        self.first, self.last = IsTold(factor), IsTold(factor)

    def forward(self, x: Tensor) -> Tensor:
        rate = self.rates[self.training]
        return self.last(self.first(x, rate, self.training), rate, told=self.training)


@pytest.mark.parametrize(("factor", "in_eval"), [(2.0, 0.5), (1.0, 0.0)])
def test_a_module_that_is_told_one_mode_and_asks_another_has_both_in_one(
    factor: float, in_eval: float
) -> None:
    gm, x = exact(TellsNumbers(factor, in_eval), torch.randn(3, 4)), torch.randn(3, 4)
    gm.eval().get_submodule("last").train()
    with pytest.raises(AssertionError, match="the model and last decide together what happens in training"):
        gm(x)


def test_a_module_that_is_told_a_mode_and_goes_by_its_own_may_be_in_another() -> None:
    model, x = TellsNumbers(1.0, 0.5), torch.randn(3, 4)
    gm = exact(model, x)
    for training in (False, True):
        for net in (model, gm):
            net.train(training).get_submodule("last").train(not training)
        assert torch.equal(seeded(gm, x), seeded(model, x))


def seeded(net: nn.Module, x: Tensor) -> Tensor:
    """What a net gives with fixed random numbers."""
    torch.manual_seed(0)
    result: Tensor = net(x)
    return result


class Noisy(nn.Module):
    """Does something in training only, and returns the result.

    Args:
        kind: what it does.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.kind == "scales":
            return x * 2 if self.training else x
        return x + torch.rand_like(x) if self.training else x


class Nested(nn.Module):
    """Uses what a part gives that goes by its own mode.

    Args:
        kind: as for `Noisy`.
        use: what becomes of it.
    """

    def __init__(self, kind: str, use: str) -> None:
        super().__init__()
        self.use, self.part = use, Noisy(kind)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(self.first(x))
        if self.use == "goes on":
            return self.last(y).relu()
        if self.use == "in training":
            return y.exp() + 1 if self.training else y
        if self.use == "picks":
            return y if self.training else x
        return y


@pytest.mark.parametrize("kind", ["draws", "scales"])
@pytest.mark.parametrize("use", ["returns", "goes on", "in training", "picks"])
def test_what_a_part_in_another_mode_gives_goes_by_its_mode(kind: str, use: str) -> None:
    model, x = Nested(kind, use), torch.randn(3, 4)
    gm = exact(model, x)
    for training in (False, True):
        for net in (model, gm):
            net.train(training).get_submodule("part").train(not training)
        if use in ("returns", "goes on"):
            assert torch.equal(seeded(gm, x), seeded(model, x))
        else:
            with pytest.raises(AssertionError, match="the model and part decide together"):
                gm(x)


def test_calls_in_one_mode_are_no_dead_code_and_are_not_held_for_good() -> None:
    class Counter:
        def count(self, x: Tensor) -> Tensor:
            return x

    counter = Counter()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(When(counter.count), (True, x))
    graph.output(x)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == 3
    kept = weakref.ref(counter)
    del graph, x, counter
    gc.collect()
    assert kept() is None


class Shifts(nn.Module):
    """Moves buffers on in training, from one name to another.

    Args:
        how: which.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        self.register_buffer("new", torch.ones(4))
        self.register_buffer("old", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training and self.how == "swaps":
            self.old, self.new = self.new, self.old
        elif self.training:
            self.old = self.new
            self.new = x.detach().mean(0)
        return x + self.old


@pytest.mark.parametrize("how", ["swaps", "shifts"])
def test_buffers_that_become_one_another_do_so_in_the_graph(how: str) -> None:
    model = Shifts(how)
    gm = copy.deepcopy(exact(model, torch.randn(3, 4)))
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(gm.train()(x), model.train()(x))
        assert torch.equal(gm.get_buffer("old"), model.get_buffer("old"))
        assert torch.equal(gm.get_buffer("new"), model.get_buffer("new"))


class LooksAtNumbers(nn.Module):
    """Goes by the class of a number, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * 2 if self.training and type(x.shape[0]) is int else x


def test_what_recording_changes_in_training_alone_is_seen() -> None:
    with pytest.raises(TraceError, match="in training mode"):
        trace(LooksAtNumbers(), torch.randn(3, 4))
