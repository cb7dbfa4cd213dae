import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import pdp_fx
from pdp_fx import (
    NM,
    Channels,
    PassError,
    PruneSpec,
    Schedule,
    SpecError,
    StateError,
    Unstructured,
    VerifyError,
)
from pdp_fx.compiler import Context, Pass
from pdp_fx.granularity import Rule
from pdp_fx.ops.explicit import ExplicitBatchNorm2d, ExplicitConv2d, ExplicitLinear
from pdp_fx.ops.kinds import named_modules
from pdp_fx.passes import PREPARE
from tests.nets import (
    NETS,
    RULES,
    assert_unchanged,
    at_once,
    counts,
    difference,
    mask_of,
    net,
    pruned,
    shake,
    snapshot,
    state,
    train,
)

every_net = pytest.mark.parametrize("name", NETS)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def prepared_net(name: str, rule: Rule) -> tuple[nn.Module, fx.GraphModule, Tensor]:
    model, x = net(name)
    return model, pdp_fx.prepare(model, PruneSpec(rule), x), x


@every_net
@every_rule
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_before_the_ramp_everything_is_bit_identical(name: str, rule: Rule, training: bool) -> None:
    model, x = net(name)
    twin = copy.deepcopy(model)
    prepared = pdp_fx.prepare(model, PruneSpec(rule), x)
    outputs: list[Tensor] = []
    for module in (twin.train(training), prepared.train(training)):
        torch.manual_seed(1)
        outputs.append(module(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    own = dict(prepared.named_parameters())
    for name, parameter in twin.named_parameters():
        mine, theirs = parameter.grad, own[name].grad
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs), name
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, prepared.get_buffer(name)), name


@every_net
@every_rule
def test_parameters_keep_their_identity_names_and_order(name: str, rule: Rule) -> None:
    model, prepared, _ = prepared_net(name, rule)
    expected = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    assert [(name, id(parameter)) for name, parameter in prepared.named_parameters()] == expected
    assert [key for key in prepared.state_dict() if not key.startswith("pdp.")] == list(model.state_dict())


@every_rule
def test_training_flags_are_kept_module_by_module(rule: Rule) -> None:
    model, x = net("residual")
    model.train()
    model.get_submodule("stem.1").eval()
    prepared = pdp_fx.prepare(model, PruneSpec(rule), x)
    for name, module in named_modules(model):
        assert prepared.get_submodule(name).training == module.training, name
    assert state(prepared).training
    assert not state(pdp_fx.prepare(model.eval(), PruneSpec(rule), x)).training


@every_net
@every_rule
def test_a_dense_checkpoint_loads_strictly(name: str, rule: Rule) -> None:
    checkpoint = {key: tensor + 1 for key, tensor in net(name)[0].state_dict().items()}
    _, prepared, _ = prepared_net(name, rule)
    prepared.load_state_dict(checkpoint, strict=True)
    assert all(torch.equal(prepared.state_dict()[key], tensor) for key, tensor in checkpoint.items())


@every_net
@every_rule
def test_the_users_model_is_not_changed(name: str, rule: Rule) -> None:
    model, x = net(name)
    model.train()
    before, x_before, generator = snapshot(model), x.clone(), torch.get_rng_state()
    prepared = pdp_fx.prepare(model, PruneSpec(rule), x)
    assert_unchanged(model, before)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), generator)
    prepared.eval()
    assert_unchanged(model, before)


@pytest.mark.parametrize("step", PREPARE.passes, ids=[step.name for step in PREPARE.passes])
def test_a_pass_that_fails_half_way_leaves_the_users_model_alone(
    step: Pass, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net("residual")
    before = snapshot(model)
    run = type(step).run

    def fail(self: Pass, gm: fx.GraphModule, ctx: Context) -> bool:
        run(self, gm, ctx)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(type(step), "run", fail)
    with pytest.raises(PassError, match=f"pass '{step.name}' failed: RuntimeError: out of luck") as error:
        pdp_fx.prepare(model, at_once(Channels(ratio=0.5), {"fc": Unstructured(0.5)}), x)
    assert "placeholder" in error.value.__notes__[0]
    assert_unchanged(model, before)
    monkeypatch.undo()
    assert pdp_fx.prepare(model, PruneSpec(Unstructured(0.5)), x)


@every_rule
def test_the_modes_of_model_and_prepared_model_are_independent(rule: Rule) -> None:
    model, prepared, x = prepared_net("residual", rule)
    prepared.train()
    model.eval()
    assert all(module.training for module in prepared.modules())
    prepared.eval()
    model.train()
    assert not any(module.training for module in prepared.modules())
    assert set(model.modules()).isdisjoint(prepared.modules())
    torch.testing.assert_close(prepared(x), model.eval()(x), rtol=0, atol=0)


def test_hooks_on_the_prepared_model_do_not_fire_in_the_users() -> None:
    model, prepared, x = prepared_net("conv", RULES["unstructured"])
    seen: list[str] = []

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append(name)

    prepared.get_submodule("bn1").register_forward_hook(partial(note, "prepared"))
    model.get_submodule("bn2").register_forward_hook(partial(note, "model"))
    model(x)
    assert seen == ["model"]
    prepared(x)
    assert seen == ["model", "prepared"]


class Aliased(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(self.stem(x)))))


@every_rule
def test_a_module_under_two_names_stays_one_module(rule: Rule) -> None:
    x = torch.randn(6, 4)
    prepared = pruned(shake(Aliased()), rule, x)
    assert prepared.get_submodule("first") is prepared.get_submodule("second")
    assert difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-5


@every_rule
def test_casting_the_prepared_model_leaves_the_masks_alone(rule: Rule) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model, x = net("residual")
        prepared = pruned(model, rule, x)
        before = {name: buffer.clone() for name, buffer in state(prepared).named_buffers()}
        prepared.to(dtype)
        for name, buffer in state(prepared).named_buffers():
            assert buffer.dtype == torch.int64
            assert torch.equal(buffer, before[name]), name
        assert counts(prepared) == {name: count_of(prepared, name) for name in counts(prepared)}
        assert prepared.eval()(x.to(dtype)).isfinite().all()
        converted = pdp_fx.convert(prepared)
        assert next(converted.parameters()).dtype == dtype


def count_of(prepared: nn.Module, name: str) -> int:
    mask, rule = mask_of(prepared, name), state(prepared).rules[name]
    if isinstance(rule, NM):
        return prepared.get_parameter(mask.parameters_read[0]).numel() * (rule.of - rule.keep) // rule.of
    return int(mask.count)


@every_net
@every_rule
def test_a_prepared_model_deep_copies_and_pickles(name: str, rule: Rule) -> None:
    model, x = net(name)
    prepared = pruned(model, rule, x).eval()
    for copied in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        torch.testing.assert_close(copied(x), prepared(x), rtol=0, atol=0)
        assert counts(copied) == counts(prepared)
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in prepared.parameters()}
        pdp_fx.step(copied)
        assert int(state(copied).counter) == int(state(prepared).counter) + 1
        assert difference(copied, pdp_fx.convert(copied), x) <= 1e-5


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from the outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)


def compiled(module: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(module, backend="eager"))


@pytest.mark.parametrize("wrap", [Wrapper, nn.DataParallel, compiled])
def test_a_prepared_model_is_found_inside_a_wrapper(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, prepared, x = prepared_net("mlp", RULES["unstructured"])
    wrapped = wrap(pdp_fx.prepare(model, at_once(Unstructured(0.5)), x))
    pdp_fx.step(wrapped)
    converted = pdp_fx.convert(wrapped)
    assert difference(wrapped.eval(), converted, x) <= 1e-5
    with pytest.raises(StateError, match="prepared already"):
        pdp_fx.prepare(wrapped, at_once(Unstructured(0.5)), x)
    del prepared


def test_several_prepared_models_in_one_module_are_refused() -> None:
    both = nn.ModuleList([prepared_net("mlp", Unstructured(0.5))[1] for _ in range(2)])
    for verb in (pdp_fx.step, pdp_fx.explain, pdp_fx.report, pdp_fx.channel_graph, pdp_fx.print_graph):
        with pytest.raises(StateError, match=f"holds 2 prepared models; call {verb.__name__} for each"):
            verb(both)


@every_rule
def test_the_mode_of_the_caller_does_not_matter(rule: Rule) -> None:
    model, x = net("mlp")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        prepared = pdp_fx.prepare(model, at_once(rule), x)
    pdp_fx.step(prepared)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        converted = pdp_fx.convert(prepared)
    converted(x).sum().backward()
    assert difference(prepared.eval(), converted, x) <= 1e-5


def test_frozen_parameters_stay_frozen() -> None:
    model, x = net("conv")
    model.get_parameter("conv1.weight").requires_grad_(False)
    prepared = pruned(model, Unstructured(0.5), x)
    assert not prepared.get_parameter("conv1.weight").requires_grad
    converted = pdp_fx.convert(prepared)
    assert {name: p.requires_grad for name, p in converted.named_parameters()} == {
        "conv1.weight": False,
        "conv1.bias": False,
        "conv2.weight": True,
        "conv2.bias": True,
        "fc.weight": True,
        "fc.bias": True,
    }


@every_rule
def test_a_frozen_parameter_may_be_infinite(rule: Rule) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
            ahead = torch.ones(5, 5).triu(1).bool()
            self.ahead = nn.Parameter(torch.zeros(5, 5).masked_fill(ahead, -math.inf), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(1, 2) + self.ahead
            out: Tensor = self.out(scores.softmax(-1) @ self.v(x))
            return out

    x = torch.randn(2, 5, 8)
    prepared = pruned(Masked().double(), rule, x.double())
    wanted = prepared.eval()(x.double())
    torch.testing.assert_close(pdp_fx.convert(prepared)(x.double()), wanted, rtol=1e-9, atol=1e-9)


def test_example_inputs_are_copied() -> None:
    model, x = net("conv")
    prepared = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), x)
    x.fill_(float("nan"))
    pdp_fx.step(prepared)
    assert pdp_fx.convert(prepared)


class InPlace(nn.Module):
    """Writes to its input, as preprocessing code does, counts its calls, and keeps the last one."""

    calls: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(1).mul_(3)
        self.calls.add_(1)
        self.last.resize_(x.shape).copy_(x.detach())
        return self.out(functional.relu(self.fc(x)))


@every_rule
def test_a_model_that_writes_to_its_input_and_its_buffers_is_left_as_it_was(rule: Rule) -> None:
    model, x = InPlace(), torch.randn(3, 8)
    before, x_before = snapshot(model), x.clone()
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    assert_unchanged(model, before)
    assert torch.equal(x, x_before)
    torch.testing.assert_close(converted(x.clone()), prepared.eval()(x.clone()), rtol=1e-5, atol=1e-6)


class Clamped(nn.Module):
    """Clamps a weight ahead of its use; in it the table keeps its rows short."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, max_norm=0.1)
        self.fc, self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.clamp_(-0.1, 0.1)
        return self.out(functional.relu(self.hidden(self.fc(self.table(x)))))


@every_rule
def test_a_model_that_writes_to_its_weights_is_left_as_it_was_and_goes_on_writing(rule: Rule) -> None:
    model, x = Clamped(), torch.arange(3)
    before, wanted = snapshot(model), Clamped()
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    assert_unchanged(model, before)
    wanted.load_state_dict(model.state_dict())
    assert torch.equal(prepared(x), wanted(x))
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-5, atol=1e-6)


class NeedsGradients(nn.Module):
    """Has a loss of zero need gradients in training, as that of a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.register_buffer("none", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.get_buffer("none")
        return self.fc(x), loss.requires_grad_() if self.training else loss


def test_a_buffer_that_needs_gradients_in_training_is_left_as_it_was() -> None:
    model, x = NeedsGradients(), torch.randn(3, 4)
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.5)), x)
    assert not model.get_buffer("none").requires_grad
    assert [tensor.requires_grad for tensor in prepared(x)] == [True, True]


class Follows(nn.Module):
    """A teacher that follows its student while training."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = follower(), follower()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.data.lerp_(ours.detach(), 0.1)
        return self.student(x), self.teacher(x).detach()


def follower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@every_rule
def test_what_is_written_to_parameters_in_training_reaches_them(rule: Rule) -> None:
    model, x = shake(Follows()), torch.randn(5, 8)
    wanted = Follows()
    wanted.load_state_dict(model.state_dict())
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    prepared(x)
    wanted(x)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    pdp_fx.step(prepared)
    students, teachers = (dict(part.named_parameters()) for part in (model.student, model.teacher))
    expected = {name: teachers[name].lerp(student, 0.1) for name, student in students.items()}
    prepared(x)
    torch.testing.assert_close(teachers, expected, rtol=0, atol=0)
    converted = pdp_fx.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-5, atol=1e-6)


class Views(nn.Module):
    """Calls its layers twice: while training on what is drawn, afterwards on what is mirrored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers(x)
        if self.training:
            return first, self.layers(x + 0 * torch.randn_like(x))
        return first, self.layers(x.flip(1))


@every_rule
def test_calls_in_one_mode_only_have_the_masks_of_the_other_calls(rule: Rule) -> None:
    model, x = shake(Views()), torch.randn(5, 8)
    prepared = pdp_fx.prepare(model, at_once(rule), x)
    pdp_fx.step(prepared)
    first, second = prepared.train()(x)
    assert torch.equal(first, second)
    first, second = prepared.eval()(x)
    assert torch.equal(second, prepared(x.flip(1))[0])
    converted = pdp_fx.convert(prepared)
    torch.testing.assert_close(converted(x), (first, second), rtol=1e-5, atol=1e-6)


class KeepsRowsOfLengthOne(nn.Module):
    """Afterwards all rows are as long, so that none is the weakest any more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.copy_(functional.normalize(self.fc.weight, dim=1))
        return self.out(functional.relu(self.norm(self.fc(x))))


def test_channels_stay_whose_weights_are_written_to_in_eval_mode() -> None:
    with pytest.raises(SpecError, match="the model writes to this parameter in eval mode, too"):
        pdp_fx.prepare(KeepsRowsOfLengthOne(), at_once(Channels(0.5)), torch.randn(3, 8))


class Caches(nn.Module):
    """Attention that keeps keys and values in buffers, and writes to them with gradients on."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 8) for _ in range(3))
        self.register_buffer("keys", torch.zeros(4, 16, 8))
        self.register_buffer("values", torch.zeros(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        self.keys[:b, :t], self.values[:b, :t] = self.k(x), self.v(x)
        scores = self.q(x) @ self.keys[:b, :t].transpose(1, 2)
        return scores.softmax(-1) @ self.values[:b, :t]


def test_buffers_that_are_written_with_gradients_stay_buffers() -> None:
    model, x = Caches().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    prepared = pdp_fx.prepare(model, at_once(Unstructured(0.5)), x)
    for buffer in (model.keys, model.values):
        assert (buffer.is_leaf, buffer.requires_grad, bool(buffer.any())) == (True, False, False)
    prepared.train()(x).sum().backward()
    pdp_fx.step(prepared)
    assert not prepared.get_buffer("keys").is_leaf
    converted = pdp_fx.convert(prepared.eval())
    assert converted.get_buffer("keys").data_ptr() != converted.get_buffer("values").data_ptr()
    assert torch.allclose(converted(x), prepared(x), atol=1e-12)


WRITES: dict[str, Callable[[nn.Linear, nn.Linear], Any]] = {
    "multiplied by ones and zeros": lambda own, _: own.weight.data.mul_(torch.arange(8) % 4 > 0),
    "held between limits": lambda own, _: own.weight.clamp_(-0.2, 0.2),
    "replaced by a part": lambda own, _: setattr(own.weight, "data", own.weight.data.tril()),
    "moved to another": lambda own, other: own.weight.lerp_(other.weight, 0.1),
    "held to a length": lambda own, _: setattr(own.weight, "data", own.weight.data.renorm(2, 0, 0.5)),
}


class Writes(nn.Module):
    """Writes to a weight in both modes, before it uses it."""

    def __init__(self, write: Callable[[nn.Linear, nn.Linear], Any]) -> None:
        super().__init__()
        self.other, self.own, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.other(x))
        with torch.no_grad():
            self.write(self.own, self.other)
        return self.out(functional.relu(self.own(hidden)))


@pytest.mark.parametrize("rule", [Unstructured(0.5), NM(2, 4)])
@pytest.mark.parametrize("way", WRITES)
def test_what_a_model_writes_to_a_weight_stays_written(way: str, rule: Rule) -> None:
    torch.manual_seed(0)
    model, x = Writes(WRITES[way]).double(), torch.randn(5, 8, dtype=torch.float64)
    prepared = pdp_fx.prepare(copy.deepcopy(model), at_once(rule), x)
    masked = not way.endswith(("another", "length"))
    assert (prepared.get_submodule("pdp.masks")._modules.keys() >= {"own_weight"}) is masked
    for share in (0, 1):
        for own, each in ((model.own.weight, model), (prepared.get_parameter("own.weight"), prepared)):
            each.train()
            with torch.no_grad():
                own.copy_(torch.linspace(-1, 1, 64).view(8, 8))
            each(x)
        reads_masked = share == 1 and way == "moved to another"
        assert torch.equal(prepared.get_parameter("own.weight"), model.own.weight) is not reads_masked
        assert not torch.equal(model.own.weight, torch.linspace(-1, 1, 64).view(8, 8))
        pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared.eval())
    for _ in range(3):
        assert torch.allclose(converted(x), prepared(x), atol=1e-12)


def test_a_weight_that_is_read_before_it_is_written_stays() -> None:
    class Late(Writes):
        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) + self.write(self.own, self.other).sum() + self.own(x)

    with pytest.raises(SpecError, match="own: the model writes to it after it has read it"):
        pdp_fx.prepare(
            Late(lambda own, _: own.weight.data.mul_(0.5)), at_once(Unstructured(0.5)), torch.randn(5, 8)
        )


def test_a_weight_that_is_written_unseen_at_two_calls_has_its_gradients() -> None:
    class Twice(Writes):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                self.write(self.own, self.other)
                x = self.own(x).relu()
            return self.out(self.other(x))

    model, x = Twice(WRITES["multiplied by ones and zeros"]).double(), torch.randn(5, 8, dtype=torch.float64)
    prepared = pdp_fx.prepare(copy.deepcopy(model), at_once(Unstructured(0.5)), x)
    assert "own_weight" not in prepared.get_submodule("pdp.masks")._modules
    for each in (model, prepared):
        each.train()(x).sum().backward()
    found, wanted = prepared.get_parameter("own.weight").grad, model.own.weight.grad
    assert found is not None
    assert wanted is not None
    assert torch.equal(found, wanted)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Tensor, shift: float = 0.5) -> Tensor:
        return self.out(functional.relu(self.fc(x)) * scale + shift)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_example_inputs_may_be_positional_or_named(form: str) -> None:
    x, scale = torch.randn(3, 8), torch.rand(3, 1)
    given = (x, scale) if form == "tuple" else {"x": x, "scale": scale}
    prepared = pruned_two_inputs(given)
    converted = pdp_fx.convert(prepared)
    assert difference(prepared.eval(), converted, x, scale) <= 1e-5
    assert converted.get_submodule("fc").weight.shape == (8, 8)


def pruned_two_inputs(given: tuple[Tensor, ...] | dict[str, Tensor]) -> fx.GraphModule:
    prepared = pdp_fx.prepare(TwoInputs(), at_once(Unstructured(0.5)), given)
    pdp_fx.step(prepared)
    return prepared


def test_without_example_inputs_weights_can_be_pruned() -> None:
    model, x = net("conv")
    for rule in (Unstructured(0.5), NM(2, 4)):
        prepared = pdp_fx.prepare(model, at_once(rule))
        assert state(prepared).channels is None
        pdp_fx.step(prepared)
        assert difference(prepared.eval(), pdp_fx.convert(prepared), x) <= 1e-5


@every_rule
def test_a_layer_that_only_eval_mode_uses_is_kept(rule: Rule) -> None:
    class Calibrated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            return self.out(functional.relu(x if self.training else self.norm(x)))

    prepared = pdp_fx.prepare(Calibrated(), at_once(rule), torch.randn(3, 8))
    pdp_fx.step(prepared)
    x = torch.randn(4, 8)
    torch.testing.assert_close(pdp_fx.convert(prepared)(x), prepared.eval()(x), rtol=1e-5, atol=1e-6)


def test_no_trainable_parameter_is_added_and_masks_train() -> None:
    model, x = net("residual")
    prepared = pdp_fx.prepare(model, at_once(Channels(ratio=0.5)), x)
    assert not list(state(prepared).parameters())
    pdp_fx.step(prepared)
    before = {name: p.detach().clone() for name, p in prepared.named_parameters()}
    train(prepared, x)
    assert not any(torch.equal(before[name], p) for name, p in prepared.named_parameters() if p.ndim > 1)


def test_layers_that_do_not_divide_are_skipped_and_said() -> None:
    model, x = net("residual")
    skipped = dict(state(pdp_fx.prepare(model, PruneSpec(NM(2, 4)), x)).skipped)
    assert skipped == {
        "stem.0": "3 input channels do not divide into groups of 4",
        "depthwise.0": "1 input channels do not divide into groups of 4",
    }


def test_an_nm_layer_freezes_the_channels_that_it_reads() -> None:
    model, x = net("conv")
    spec = at_once(Channels(ratio=0.5), {"fc": NM(2, 4)})
    prepared = pdp_fx.prepare(model, spec, x)
    reasons = {group.name: [str(reason) for reason in group.reasons] for group in state(prepared).kept}
    assert [name for name, _ in state(prepared).mask_items()] == ["fc_weight", "conv1"]
    assert reasons["conv2"] == [
        "%fc: fc.weight is pruned N:M along these channels; removing some would break its pattern; "
        "give that layer another rule"
    ]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_mask_that_changes_the_model_before_anything_is_pruned_is_refused(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is checked before masks are inserted; what inserting them does is checked, too."""
    model, x = net("residual")
    before = model.eval()(x)
    kind: type[nn.Module] = ExplicitBatchNorm2d if isinstance(rule, Channels) else ExplicitConv2d
    forward: Callable[..., Tensor] = kind.forward

    def off(layer: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return forward(layer, *args, **kwargs) * 1.01

    monkeypatch.setattr(kind, "forward", off)
    with pytest.raises(
        VerifyError, match="differs from yours before anything is pruned.*bug of this package"
    ):
        pdp_fx.prepare(model, at_once(rule), x)
    assert torch.equal(model(x), before)


def test_a_mask_that_changes_training_mode_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Louder(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            x = super().forward(input)
            return x * 2 if self.training else x

    forward: Callable[..., Tensor] = ExplicitLinear.forward

    def off(layer: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return forward(layer, *args, **kwargs) * (1.01 if layer.training else 1)

    model = nn.Sequential(nn.Linear(4, 4), Louder(4, 4))
    monkeypatch.setattr(ExplicitLinear, "forward", off)
    with pytest.raises(VerifyError, match="in training mode before anything is pruned.*bug of this package"):
        pdp_fx.prepare(model, at_once(RULES["unstructured"]), torch.randn(3, 4))


@pytest.mark.parametrize("factor", [1 + 2**-52, 1 + 1e-4])
def test_rounding_that_a_model_amplifies_is_told_from_masks_that_change_it(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Amplifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b((h - h.float().double()) * 1e7)

    forward: Callable[..., Tensor] = ExplicitLinear.forward
    monkeypatch.setattr(ExplicitLinear, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * factor)
    model, x = Amplifies().double(), torch.randn(3, 32, dtype=torch.float64)
    off = pytest.raises(VerifyError, match="before anything is pruned")
    with off if factor > 1 + 1e-6 else contextlib.nullcontext():
        pdp_fx.prepare(model, at_once(RULES["unstructured"]), x)


def test_a_masked_model_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net("residual")

    def fails(layer: ExplicitConv2d, *args: Tensor, **kwargs: Tensor) -> Tensor:
        raise ValueError("no such argument")

    monkeypatch.setattr(ExplicitConv2d, "forward", fails)
    with pytest.raises(VerifyError, match="masked model fails: ValueError: no such argument"):
        pdp_fx.prepare(model, at_once(RULES["unstructured"]), x)


@every_rule
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler
def test_layers_compiled_in_place_are_pruned(place: int, rule: Rule) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    model[place].compile(backend="eager")
    found, expected = pruned(model, at_once(rule), x), pruned(plain, at_once(rule), x)
    assert torch.equal(found(x), expected(x))
    assert torch.equal(pdp_fx.convert(found)(x), pdp_fx.convert(expected)(x))


class Versioned(nn.Module):
    """Adds to its state dict what is no tensor."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.layer, self.version = nn.Linear(8, 8), version

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class HoldsVersions(Versioned):
    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.inner = nn.Sequential(Versioned(version + 1), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(super().forward(x))


@every_rule
def test_extra_state_goes_through_prepared_models(rule: Rule) -> None:
    dense, x = HoldsVersions(3), torch.randn(3, 8)
    prepared = pdp_fx.prepare(HoldsVersions(5), at_once(rule), x)
    for one in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert one.state_dict().keys() > dense.state_dict().keys()
        assert one.state_dict()["_extra_state"] == {"version": 5}
        one.load_state_dict(one.state_dict() | dense.state_dict())
        back = HoldsVersions(7)
        kept = {name: value for name, value in one.state_dict().items() if not name.startswith("pdp.")}
        back.load_state_dict(kept)
        assert (back.version, cast(Versioned, back.inner[0]).version) == (3, 4)
        assert torch.equal(one.eval()(x), dense.eval()(x))
    pdp_fx.step(prepared)
    converted = pdp_fx.convert(prepared)
    assert not any("extra" in name for name in converted.state_dict())


@pytest.mark.parametrize("rule", [Channels(0.5), Unstructured(0.5), NM(2, 4)])
def test_nothing_is_rounded_otherwise_without_gradients_before_the_ramp(rule: Rule) -> None:
    """torch multiplies with a weight that needs gradients in another way, also where they are off."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x.transpose(0, 1)))

    torch.manual_seed(0)
    model, x = Turned().eval(), torch.randn(2, 38, 32)
    prepared = pdp_fx.prepare(model, PruneSpec(rule, schedule=Schedule(start=0, epsilon=1.0)), (x,)).eval()
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            assert torch.equal(prepared(x), model(x))


class Freezes(nn.Module):
    """Freezes a layer ahead of its use, or behind it in training mode."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.first, self.still, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            for parameter in self.still.parameters():
                parameter.requires_grad = False
        x = functional.relu(self.still(functional.relu(self.first(x))))
        if self.late and self.training:
            self.still.requires_grad_(False)
        return self.last(x)


@every_rule
@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_freezes_a_layer_as_it_runs_freezes_it_with_masks(rule: Rule, late: bool) -> None:
    wanted, x = Freezes(late), torch.randn(4, 8)
    prepared = pdp_fx.prepare(copy.deepcopy(wanted), at_once(rule), x)
    for _ in range(3):
        for model in (wanted, prepared):
            model.zero_grad()
            model.train()(x).sum().backward()
        for name, parameter in wanted.named_parameters():
            own = prepared.get_parameter(name)
            assert (own.requires_grad, own.grad is None) == (parameter.requires_grad, parameter.grad is None)
        pdp_fx.step(prepared)
    torch.testing.assert_close(pdp_fx.convert(prepared)(x), prepared.eval()(x), rtol=1e-5, atol=1e-6)


@every_rule
def test_a_shallow_copy_is_a_prepared_model_around_the_same_weights(rule: Rule) -> None:
    x = torch.randn(4, 8)
    prepared = pdp_fx.prepare(Freezes(late=True), at_once(rule), x)
    other = copy.copy(prepared)
    pdp_fx.step(other)
    assert other.state_dict().keys() == prepared.state_dict().keys()
    assert other.get_parameter("last.weight") is prepared.get_parameter("last.weight")
    torch.testing.assert_close(pdp_fx.convert(other)(x), other.eval()(x), rtol=1e-5, atol=1e-6)
