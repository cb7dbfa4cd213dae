"""Policies of a user: what they may do, what the package does with them, and what it refuses."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pdp_fx
from pdp_fx import (
    NM,
    ChannelPolicy,
    Channels,
    MaskPolicy,
    MaskSite,
    NMPolicy,
    Progress,
    PruneSpec,
    Schedule,
    SpecError,
    StateError,
    Unstructured,
    WeightPolicy,
)
from pdp_fx.masks import WeightMask
from pdp_fx.planning import parameters_of
from pdp_fx.printing import graph_text
from tests.nets import mask_of, state, train

AT_ONCE = Schedule(start=0, epsilon=1.0)


class Shrink(WeightPolicy):
    """A trained threshold for each layer, which decides alone how much goes."""

    planned = False
    start: ClassVar[float] = -1.5

    def __init__(self, site: MaskSite, start: float | None = None) -> None:
        super().__init__(site)
        self.score = nn.Parameter(torch.tensor(self.start if start is None else start))

    def soft(self, weight: Tensor) -> Tensor:
        return weight.sign() * (weight.abs() - self.score.sigmoid()).relu()

    def hard(self, weight: Tensor) -> Tensor:
        return self.soft(weight)

    def pruned(self, *weights: Tensor) -> Tensor:
        return self.soft(weights[0]) == 0

    def penalty(self, *weights: Tensor) -> Tensor:
        return -self.score


class Straight(WeightPolicy):
    """The hard mask in training, too; the gradient is that of the dense layer."""

    def soft(self, weight: Tensor) -> Tensor:
        return weight + (self.hard(weight) - weight).detach()


class StraightNM(NMPolicy):
    def soft(self, weight: Tensor) -> Tensor:
        return weight + (self.hard(weight) - weight).detach()


class Given(ChannelPolicy):
    """Scores from elsewhere: here the last channels are the best."""

    def soft(self, *weights: Tensor) -> Tensor:
        return self.hard(*weights)

    def scores(self, *weights: Tensor) -> Tensor:
        return torch.arange(1.0, self.width + 1, device=weights[0].device)


class Recorded(WeightPolicy):
    """Writes down what `update` is told."""

    calls: ClassVar[list[tuple[int, int, float]]] = []

    def soft(self, weight: Tensor) -> Tensor:
        return self.hard(weight)

    @classmethod
    def update(
        cls, masks: Sequence[MaskPolicy], weights: Sequence[tuple[Tensor, ...]], now: Progress
    ) -> None:
        assert not torch.is_grad_enabled()
        assert [mask.count.item() for mask in masks] == [
            mask.pruned(*w).sum() for mask, w in zip(masks, weights, strict=True)
        ]
        cls.calls.append((len(masks), now.counter, now.share))


class Alone(Straight):
    def update(self, masks: Any, weights: Any, now: Progress) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class Unfinished(WeightPolicy): ...


class BelowMean(Given):
    """Decides by itself how many channels go, and keeps its own count."""

    planned = False

    def pruned(self, *weights: Tensor) -> Tensor:
        scores = self.scores(*weights)
        self.count.fill_(1)
        return scores < scores.mean()

    def kept(self, scores: Tensor) -> Tensor:
        return (scores >= scores.mean()).float()


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


def prepared(rule: Any, x: Tensor, **options: Any) -> Any:
    return pdp_fx.prepare(net(), PruneSpec(rule, schedule=AT_ONCE, **options), x)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: p == 0 for name, p in model.named_parameters() if p.ndim > 1}


def test_pdp_is_what_a_rule_without_a_policy_stands_for(x: Tensor) -> None:
    default, named = prepared(Unstructured(0.5), x), prepared(Unstructured(0.5, policy=WeightMask), x)
    for model in (default, named):
        train(model, x)
        pdp_fx.step(model)
        train(model, x)
    assert torch.equal(default(x), named(x))
    assert torch.equal(pdp_fx.convert(default)(x), pdp_fx.convert(named)(x))


def test_extra_parameters_train_with_the_model_and_go_with_convert(x: Tensor) -> None:
    model = prepared(Unstructured(0.5, policy=Shrink), x)
    scores = [name for name, _ in model.named_parameters() if name.startswith("pdp.")]
    assert scores == [f"pdp.masks.{index}_weight.score" for index in ("0", "2", "4")]
    before = mask_of(model, "0_weight").get_parameter("score").item()
    train(model, x)
    assert mask_of(model, "0_weight").get_parameter("score").item() != before
    small = pdp_fx.convert(model)
    assert len(list(small.parameters())) == len(list(net().parameters()))
    assert torch.equal(small(x), model.eval()(x))


@pytest.mark.parametrize("policy", [Shrink, Straight, functools.partial(Shrink, start=-2.0)])
def test_convert_gives_the_zeros_of_eval_mode_bit_for_bit(
    policy: Callable[[MaskSite], MaskPolicy], x: Tensor
) -> None:
    model = prepared(Unstructured(0.5, policy=policy), x)
    train(model, x)
    pdp_fx.step(model)
    train(model, x)
    small = dict(pdp_fx.convert(model).named_parameters())
    for name, mask in state(model).mask_items():
        (weight,) = parameters_of(model, mask)
        effective = mask.eval()(weight)
        assert torch.equal(small[mask.parameters_read[0]], effective), name
        assert torch.equal(effective == 0, mask.pruned(weight))
    total = sum(int(zero.sum()) for zero in zeros(pdp_fx.convert(model)).values())
    assert total == 8 * 16 + 8 * 4 + 16 * 8 - sum(int((p != 0).sum()) for p in small.values() if p.ndim > 1)
    assert total == 144 or policy is not Straight


def test_a_policy_survives_a_checkpoint_and_a_copy(x: Tensor) -> None:
    spec = Unstructured(0.5, policy=Shrink)
    model = prepared(spec, x)
    train(model, x)
    pdp_fx.step(model)
    resumed = prepared(spec, x)
    resumed.load_state_dict(model.state_dict())
    assert torch.equal(resumed(x), model(x))
    copied = copy.deepcopy(model)
    train(copied, x)
    assert not torch.equal(copied(x), model(x))
    assert torch.equal(resumed(x), model(x))


def test_a_dense_checkpoint_loads(x: Tensor) -> None:
    model, dense = prepared(Unstructured(0.5, policy=Shrink), x), net()
    train(model, x)
    model.load_state_dict(dense.state_dict())
    assert torch.equal(model.get_parameter("0.weight"), dense.get_parameter("0.weight"))


def test_printouts_name_the_policy(x: Tensor) -> None:
    rule = Unstructured(0.5, policy=functools.partial(Shrink, start=-1.0))
    model = prepared(rule, x)
    assert "* Shrink" in graph_text(model)
    gone = int(mask_of(model, "0_weight").pruned(model.get_parameter("0.weight")).sum())
    assert gone > 0
    assert f"weights, {gone} of 128 pruned" in graph_text(model)
    assert "Unstructured(ratio=0.5, policy=Shrink(start=-1.0))" in str(pdp_fx.explain(model))
    assert repr(rule) == "Unstructured(ratio=0.5, policy=Shrink(start=-1.0))"
    assert repr(NM(2, 4, policy=StraightNM)) == "NM(keep=2, of=4, policy=StraightNM)"


def test_a_policy_of_channels_may_decide_how_many_go(x: Tensor) -> None:
    model = prepared(Channels(0.5, policy=BelowMean), x)
    assert "channels, 8 of 16 pruned" in graph_text(model)
    assert pdp_fx.convert(model).get_parameter("0.weight").shape == (8, 8)


def test_penalties_add_up_and_have_gradients(x: Tensor) -> None:
    model = prepared(Unstructured(0.5, policy=Shrink), x)
    penalty = pdp_fx.penalty(model)
    assert penalty.item() == pytest.approx(3 * 1.5)
    penalty.backward()
    grad = mask_of(model, "2_weight").get_parameter("score").grad
    assert grad is not None
    assert float(grad) == -1
    assert float(pdp_fx.penalty(prepared(Unstructured(0.5), x))) == 0


@pytest.mark.parametrize(("allocation", "pools"), [("global", [3]), ("uniform", [1, 1, 1])])
def test_update_sees_all_layers_of_a_rule_at_the_start_and_after_every_step(
    allocation: str, pools: list[int], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "calls", [])
    spec = PruneSpec(Unstructured(0.5, policy=Recorded), schedule=Schedule(1, 0.5), allocation=allocation)  # pyright: ignore[reportArgumentType]
    model = pdp_fx.prepare(net(), spec, x)
    for _ in range(3):
        pdp_fx.step(model)
    states = [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0)]
    assert Recorded.calls == [(size, *now) for now in states for size in pools]


class Centred(nn.Module):
    """Takes the mean out of every row of a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


class Decays(Straight):
    """Writes to the weights after every step."""

    @classmethod
    def update(
        cls, masks: Sequence[MaskPolicy], weights: Sequence[tuple[Tensor, ...]], now: Progress
    ) -> None:
        for (weight,) in weights:
            weight.mul_(0.5 if now.counter else 1.0)


def test_what_update_writes_to_a_weight_stays_and_is_refused_where_the_model_computes_it(x: Tensor) -> None:
    spec = PruneSpec(Unstructured(0.5, policy=Decays), schedule=AT_ONCE)
    model = pdp_fx.prepare(net(), spec, x)
    before = [model.get_parameter(name).clone() for name in state(model).weights]
    pdp_fx.step(model)
    for name, weight in zip(state(model).weights, before, strict=True):
        assert model.get_parameter(name).equal(weight * 0.5)
    centred = net()
    parametrize.register_parametrization(centred.get_submodule("2"), "weight", Centred())
    with pytest.raises(StateError, match=r"Decays.update writes to the weight of 2\..*is lost"):
        pdp_fx.prepare(centred, spec, x)


def test_rules_of_single_layers_are_updated_apart(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "calls", [])
    overrides = {
        "0": Unstructured(0.25, policy=Recorded),
        "2": Unstructured(0.75, policy=Recorded),
        "4": None,
    }
    model = pdp_fx.prepare(net(), PruneSpec(None, overrides, AT_ONCE), x)
    pdp_fx.step(model)
    pdp_fx.step(model)
    assert [size for size, _, _ in Recorded.calls] == [1] * 6
    assert {name: int(zero.sum()) for name, zero in zeros(pdp_fx.convert(model)).items()} == {
        "0.weight": 32,
        "2.weight": 96,
        "4.weight": 0,
    }


def test_policies_for_patterns_and_channels(x: Tensor) -> None:
    model = pdp_fx.prepare(
        net(),
        PruneSpec(Channels(0.5, policy=Given), {"4": NM(2, 4, policy=StraightNM), "2": None}, AT_ONCE),
        x,
    )
    pdp_fx.step(model)
    pdp_fx.step(model)
    assert mask_of(model, "0")(model.get_parameter("0.weight")).tolist() == [0.0] * 8 + [1.0] * 8
    weight = model.get_parameter("4.weight")
    assert mask_of(model, "4_weight")(weight).unflatten(1, (2, 4)).count_nonzero(2).eq(2).all()
    small = pdp_fx.convert(model)
    assert torch.equal(small.get_parameter("0.weight"), model.get_parameter("0.weight")[8:])
    torch.testing.assert_close(small(x), model.eval()(x))


def test_a_spec_with_a_policy_goes_to_text_and_back() -> None:
    spec = PruneSpec(Unstructured(0.5, policy=Straight), {"4": NM(2, 4, policy=StraightNM)})
    assert f'policy = "{__name__}.Straight"' in spec.to_toml() or "test_policy.Straight" in spec.to_toml()
    assert PruneSpec.from_toml(spec.to_toml()) == spec
    assert Unstructured(0.5, policy="pdp_fx.masks.WeightMask") == Unstructured(0.5, policy=WeightMask)


def test_what_cannot_be_a_policy_is_refused(x: Tensor) -> None:
    with pytest.raises(SpecError, match="Unstructured: policy must be a subclass of WeightPolicy.*got 3 "):
        Unstructured(0.5, policy=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match=r"NM: policy: 'pdp_fx.masks.Nothing' cannot be imported"):
        NM(2, 4, policy="pdp_fx.masks.Nothing")
    with pytest.raises(
        SpecError, match=r"0\.weight: the policy of .* must give a WeightPolicy, got .*Identity"
    ):
        prepared(Unstructured(0.5, policy=lambda _: nn.Identity()), x)
    with pytest.raises(SpecError, match=r"must give a WeightPolicy, got .*Given"):
        prepared(Unstructured(0.5, policy=Given), x)
    with pytest.raises(SpecError, match=r"the policy Unfinished does not define soft"):
        prepared(Unstructured(0.5, policy=Unfinished), x)
    with pytest.raises(SpecError, match=r"Alone.update must be a classmethod"):
        prepared(Unstructured(0.5, policy=Alone), x)
    with pytest.raises(SpecError, match=r"StraightNM is a policy for NM rules, not for Unstructured"):
        prepared(Unstructured(0.5, policy=StraightNM), x)
    with pytest.raises(SpecError, match=r"policy Shrink\(start=1\) cannot be written to a file"):
        PruneSpec(Unstructured(0.5, policy=functools.partial(Shrink, start=1))).to_toml()


def test_nothing_is_converted_before_a_free_policy_prunes(x: Tensor) -> None:
    with pytest.raises(pdp_fx.StateError, match="nothing is pruned"):
        pdp_fx.convert(prepared(Unstructured(0.5, policy=functools.partial(Shrink, start=-90.0)), x))


@pytest.mark.parametrize("policy", [Shrink, Straight])
@pytest.mark.parametrize("training", [True, False])
def test_a_policy_compiles_into_one_graph(
    policy: Callable[[MaskSite], MaskPolicy], training: bool, x: Tensor
) -> None:
    model = prepared(Unstructured(0.5, policy=policy), x)
    for _ in range(2):
        pdp_fx.step(model)
    torch.compiler.reset()
    compiled = torch.compile(model.train(training), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.compiler.reset()


class Forgets(WeightPolicy):
    def soft(self, weight: Tensor) -> Tensor:  # pyright: ignore[reportReturnType]
        torch.where(self.pruned(weight), 0.0, weight)


class Flattens(WeightPolicy):
    def soft(self, weight: Tensor) -> Tensor:
        return weight.flatten()


class Casts(WeightPolicy):
    def soft(self, weight: Tensor) -> Tensor:
        return weight

    def hard(self, weight: Tensor) -> Tensor:
        return super().hard(weight).double()


class Fails(WeightPolicy):
    def soft(self, weight: Tensor) -> Tensor:
        return weight @ weight


class OneForAll(ChannelPolicy):
    def soft(self, *weights: Tensor) -> Tensor:
        return self.hard(*weights).mean()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Unstructured(0.5, policy=Forgets), r"Forgets.soft must give a tensor, got None"),
        (Unstructured(0.5, policy=Flattens), r"Flattens.soft gives .*\(24,\) for 0.weight; .*\(6, 4\)"),
        (Unstructured(0.5, policy=Casts), r"Casts.hard gives torch.float64"),
        (Unstructured(0.5, policy=Fails), r"Fails.soft fails for 0.weight: RuntimeError"),
        (Channels(ratio=0.5, policy=OneForAll), r"OneForAll.soft gives .*\(\) .*\(6,\)"),
    ],
)
def test_what_a_policy_gives_is_checked_before_the_training(rule: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(SpecError, match=message):
        pdp_fx.prepare(model, PruneSpec(rule), torch.randn(2, 4))


def test_one_mask_for_several_weights_is_refused() -> None:
    made: list[WeightMask] = []

    def single(site: MaskSite) -> WeightMask:
        if not made:
            made.append(WeightMask(site))
        return made[0]

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(SpecError, match="gives one mask for several weights"):
        pdp_fx.prepare(model, PruneSpec(Unstructured(0.5, policy=single)), torch.randn(2, 4))


class KeepsAll(Straight):
    """Calls weights pruned, and keeps them."""

    def hard(self, weight: Tensor) -> Tensor:
        return weight


class KeepsAllNM(StraightNM):
    def hard(self, weight: Tensor) -> Tensor:
        return weight


@pytest.mark.parametrize("rule", [Unstructured(0.5, policy=KeepsAll), NM(2, 4, policy=KeepsAllNM)])
def test_a_policy_that_keeps_what_it_calls_pruned_is_refused(rule: Any, x: Tensor) -> None:
    model = prepared(rule, x)
    pdp_fx.step(model)
    with pytest.raises(StateError, match=r"KeepsAll.*hard keeps \d+ weights of .* it must give 0 for them"):
        pdp_fx.convert(model)


class ClosedGates(Given):
    """Prunes as many channels as ``closed`` says, from the last."""

    planned = False
    closed: ClassVar[int] = 16

    def pruned(self, *weights: Tensor) -> Tensor:
        return torch.arange(self.width) >= self.width - self.closed


class HalfClosedGates(ClosedGates):
    closed = 8


class OpenGates(HalfClosedGates):
    def hard(self, *weights: Tensor) -> Tensor:
        return torch.ones(self.width)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (ClosedGates, r"ClosedGates.pruned leaves 0 of the 16 channels of 0: at least 1 must stay"),
        (OpenGates, r"OpenGates.hard keeps \d+ channels of 0 that its pruned calls gone"),
    ],
)
def test_a_policy_that_prunes_whole_groups_or_keeps_gone_channels_is_refused(
    policy: type[MaskPolicy], why: str, x: Tensor
) -> None:
    model = prepared(Channels(0.5, policy=policy), x, overrides={"2": None})
    pdp_fx.step(model)
    with pytest.raises(StateError, match=why):
        pdp_fx.convert(model)


def test_a_channel_policy_of_ones_own_decides_which_channels_go(x: Tensor) -> None:
    model = prepared(Channels(0.5, policy=HalfClosedGates), x, overrides={"2": None})
    pdp_fx.step(model)
    small = pdp_fx.convert(model)
    assert torch.equal(small.get_parameter("0.weight"), model.get_parameter("0.weight")[:8])
    torch.testing.assert_close(small(x), model.eval()(x))


class BelowZero(ChannelPolicy):
    """Ranks as ever, by numbers below zero."""

    def soft(self, *weights: Tensor) -> Tensor:
        return self.hard(*weights)

    def scores(self, *weights: Tensor) -> Tensor:
        return -1.0 / super().scores(*weights)


def test_scores_may_be_negative_where_the_best_channel_of_a_part_stays() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.left, self.right = nn.Linear(4, 16), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.both(x).chunk(2, 1)
            return self.left(left) + self.right(right)

    torch.manual_seed(0)
    net, x = Halves(), torch.randn(2, 4)
    for ratio in (0.25, 0.75):
        left: list[Tensor] = []
        for policy in (None, BelowZero):
            model = pdp_fx.prepare(net, PruneSpec(Channels(ratio, policy=policy), schedule=AT_ONCE), x)
            pdp_fx.step(model)
            left.append(pdp_fx.convert(model).get_parameter("both.weight"))
        assert torch.equal(*left)
