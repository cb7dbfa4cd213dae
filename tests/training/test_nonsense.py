"""Steps that make no sense: a clear error or a defined result, and the training state is left whole."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

import pdp_fx
from pdp_fx import NM, Channels, PruneSpec, Schedule, SpecError, StateError, Unstructured
from pdp_fx.schedule import Unit
from pdp_fx.spec import Allocation, Rule
from tests.training.nets import RAMP, RULES, batch, prepared, pruned_counts, sgd, state, training_step

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RANKED = {name: rule for name, rule in RULES.items() if not isinstance(rule, NM)}
AT_ONCE = Schedule(start=0, epsilon=1.0, per="step")


@every_rule
def test_a_nan_loss_whose_step_is_skipped_changes_nothing(rule: Rule) -> None:
    model = prepared(rule)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "norm" not in name}
    images, labels = batch(7)
    (functional.cross_entropy(model(images), labels) * math.nan).backward()
    optimizer.zero_grad()
    after = model.state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert math.isfinite(training_step(model, optimizer, 3))


@pytest.mark.parametrize("rule", RANKED.values(), ids=RANKED)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_targets_are_not_fixed_from_broken_weights(rule: Rule, broken: float) -> None:
    model = prepared(rule)
    weight = model.get_parameter("inner.weight")
    whole = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = broken
    with pytest.raises(SpecError, match=r"inner.*NaN or infinite"):
        pdp_fx.step(model)
    assert int(state(model).counter) == 0
    assert not any(mask.allocated for _, mask in state(model).mask_items())
    with torch.no_grad():
        weight.copy_(whole)
    optimizer = sgd(model)
    for seed in range(5):
        training_step(model, optimizer, seed)
    assert sum(pruned_counts(model)) > 0


@every_rule
def test_weights_that_become_nan_in_the_ramp_show_in_the_loss_and_can_be_restored(rule: Rule) -> None:
    model = prepared(rule)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images, labels = batch(7)
    expected = functional.cross_entropy(model(images), labels).item()
    with torch.no_grad():
        model.get_parameter("inner.weight").fill_(math.nan)
    assert math.isnan(functional.cross_entropy(model(images), labels).item())
    pdp_fx.step(model)
    with pytest.raises(StateError, match=r"NaN"):
        pdp_fx.convert(model)
    model.load_state_dict(good)
    assert functional.cross_entropy(model(images), labels).item() == expected


def test_an_infinite_weight_in_the_ramp_is_kept_and_the_others_are_masked_as_before() -> None:
    model = pdp_fx.prepare(nn.Linear(8, 8), PruneSpec(Unstructured(0.5), schedule=AT_ONCE))
    pdp_fx.step(model)
    weight = model.get_parameter("weight")
    with torch.no_grad():
        weight[weight.abs().argmax() // 8, weight.abs().argmax() % 8] = math.inf
    (mask,) = (mask for _, mask in state(model).mask_items())
    masked = mask(weight)
    assert int(masked.isinf().sum()) == 1
    assert not bool(masked.isnan().any())
    assert pruned_counts(model) == [32]


@every_rule
def test_an_all_zero_layer_trains_and_is_pruned_exactly(rule: Rule) -> None:
    model = prepared(rule)
    with torch.no_grad():
        model.get_parameter("inner.weight").zero_()
    optimizer = sgd(model)
    losses = [training_step(model, optimizer, seed) for seed in range(6)]
    assert all(math.isfinite(loss) for loss in losses)
    targets = [int(mask.target) for _, mask in state(model).mask_items()]
    if not isinstance(rule, NM):
        assert pruned_counts(model) == targets
    pdp_fx.convert(model)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_ratio_close_to_one_keeps_a_weight_in_every_layer(allocation: Allocation) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    spec = PruneSpec(Unstructured(0.984), allocation=allocation, schedule=AT_ONCE)
    model = pdp_fx.prepare(net, spec, torch.ones(2, 8))
    optimizer = sgd(model)
    for _ in range(3):
        loss = model(torch.ones(2, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pdp_fx.step(model)
    assert all(count <= 63 for count in pruned_counts(model))
    small = pdp_fx.convert(model)
    kept = [int((parameter != 0).sum()) for parameter in small.parameters() if parameter.ndim == 2]
    assert min(kept) >= 1


@pytest.mark.parametrize("ratio", [1.0, 0.0, -0.5, 1.5, math.nan])
def test_a_ratio_that_leaves_or_prunes_nothing_is_refused_at_once(ratio: float) -> None:
    with pytest.raises(SpecError, match="ratio"):
        Unstructured(ratio)
    with pytest.raises(SpecError, match="ratio"):
        Channels(ratio=ratio)


class WithEmpty(nn.Module):
    """Beside a linear layer, one without inputs, as pruning an already pruned net by hand can leave."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Linear(8, 8)
        with pytest.warns(UserWarning, match="zero-element"):
            self.empty = nn.Linear(0, 8)

    def forward(self, rows: Tensor) -> Tensor:
        """Map (n, 8) to (n, 8)."""
        return self.full(rows) + self.empty(rows[:, :0])


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_layer_without_weights_is_left_alone(allocation: Allocation) -> None:
    rows = torch.randn(4, 8)
    spec = PruneSpec(Unstructured(0.5), allocation=allocation, schedule=AT_ONCE)
    model = pdp_fx.prepare(WithEmpty(), spec, rows)
    optimizer = sgd(model)
    for _ in range(3):
        loss = model(rows).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pdp_fx.step(model)
    assert sum(pruned_counts(model)) == 32
    assert model.eval()(rows).isfinite().all()
    assert torch.compile(model, backend="aot_eager", fullgraph=True)(rows).isfinite().all()


def test_steps_after_the_end_of_the_ramp_keep_the_target() -> None:
    model = prepared(RULES["unstructured"])
    optimizer = sgd(model)
    for seed in range(12):
        training_step(model, optimizer, seed)
    assert pruned_counts(model) == [int(mask.target) for _, mask in state(model).mask_items()]


class Adapted(nn.Module):
    """Adds something of its own to what a layer gives, and hands on what it is given, as adapters do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))

    @property
    def weight(self) -> object:
        """That of the layer."""
        return self.layer.weight

    def forward(self, images: Tensor, **kwargs: Tensor) -> Tensor:
        """What the layer gives, scaled."""
        return self.scale * self.layer(images, **kwargs)


def _adapt(model: nn.Module) -> None:
    model.inner = Adapted(model.get_submodule("inner"))


def _replace(model: nn.Module) -> None:
    model.inner = nn.Conv2d(8, 8, 3, padding=1)


def _normalise(model: nn.Module) -> None:
    parametrizations.spectral_norm(model.get_submodule("inner"))


def _prune(model: nn.Module) -> None:
    prune.l1_unstructured(model.get_submodule("inner"), "weight", 0.5)  # pyright: ignore[reportUnknownMemberType]


def _double(model: nn.Module) -> None:
    layer = model.get_submodule("inner")
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def _pack(model: nn.Module) -> None:
    weight = model.get_parameter("inner.weight").detach()
    model.get_submodule("inner").weight = nn.Parameter(TwoTensor(weight, weight.clone()))


def _flatten(model: nn.Module) -> None:
    model.get_submodule("inner").weight = nn.Parameter(model.get_parameter("inner.weight").detach().flatten())


def _replace_norm(model: nn.Module) -> None:
    model.set_submodule("inner_norm", nn.GroupNorm(2, 8))


def _normalise_head(model: nn.Module) -> None:
    parametrizations.weight_norm(model.get_submodule("head"))


CHANGES = [_adapt, _replace, _normalise, _prune, _double, _pack, _flatten]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("name", ["unstructured", "n:m"])
def test_a_masked_layer_that_was_changed_after_prepare_is_refused(
    name: str, change: Callable[[nn.Module], None]
) -> None:
    model = prepared(RULES[name])
    change(model)
    with pytest.raises(StateError, match=r"inner.*after prepare|inner.*do that before prepare"):
        pdp_fx.step(model)
    assert int(state(model).counter) == 0
    trained = prepared(RULES[name])
    for _ in range(5):
        pdp_fx.step(trained)
    change(trained)
    with pytest.raises(StateError, match=r"inner.*after prepare|inner.*do that before prepare"):
        pdp_fx.convert(trained)


@pytest.mark.parametrize(("per", "steps"), [("epoch", 1), ("step", 96)])
def test_a_layer_that_was_changed_in_the_ramp_is_refused_before_it_ends(per: Unit, steps: int) -> None:
    model = prepared(RULES["unstructured"], Schedule(1, 0.001, per))
    for _ in range(5):
        pdp_fx.step(model)
    _prune(model)
    for _ in range(steps - 1):
        pdp_fx.step(model)
    with pytest.raises(StateError, match=r"inner.*do that before prepare"):
        pdp_fx.step(model)


@pytest.mark.parametrize("change", [_replace_norm, _normalise_head, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_a_layer_around_pruned_channels_that_was_changed_after_prepare_is_refused(
    change: Callable[[nn.Module], object],
) -> None:
    model = prepared(RULES["channels"])
    change(model)
    with pytest.raises(StateError, match="was replaced, wrapped or given another forward after prepare"):
        pdp_fx.step(model)


class Tied(nn.Module):
    """Two layers with one weight, and one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third, self.last = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.other(self.one(x).relu()).relu()).relu())


def _load_by_assigning(model: nn.Module) -> None:
    model.load_state_dict(Tied().state_dict(), assign=True)


def _make_two(model: nn.Module) -> None:
    model.get_submodule("other").weight = nn.Parameter(torch.randn(8, 8))


def _empty(model: nn.Module) -> None:
    model.to("meta").to_empty(device="cpu").load_state_dict(Tied().state_dict())


@every_rule
@pytest.mark.parametrize("untie", [_load_by_assigning, _make_two, _empty])
@pytest.mark.parametrize("after", [0, 3])
def test_weights_that_were_tied_when_prepared_have_to_stay_tied(
    rule: Rule, untie: Callable[[nn.Module], None], after: int
) -> None:
    model = pdp_fx.prepare(Tied(), PruneSpec(rule, schedule=RAMP), torch.randn(2, 8))
    for _ in range(after):
        pdp_fx.step(model)
    untie(model)
    with pytest.raises(StateError, match="one parameter when the model was prepared and are two now"):
        pdp_fx.step(model)
    model.get_submodule("other").weight = model.get_submodule("one").weight
    pdp_fx.step(model)


@every_rule
def test_weights_have_to_be_tied_before_prepare(rule: Rule) -> None:
    model = pdp_fx.prepare(Tied(), PruneSpec(rule, schedule=RAMP), torch.randn(2, 8))
    model.get_submodule("third").weight = model.get_submodule("one").weight
    with pytest.raises(StateError, match="become one parameter with one.weight after prepare"):
        pdp_fx.step(model)


@every_rule
def test_a_model_without_numbers_is_refused_and_goes_on_once_it_has_them(rule: Rule) -> None:
    model = prepared(rule)
    for _ in range(5):
        pdp_fx.step(model)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counts = pruned_counts(model)
    model.to("meta")
    for verb in (pdp_fx.step, pdp_fx.convert):
        with pytest.raises(StateError, match=rf"{verb.__name__}\(model\) needs .* on the meta device"):
            verb(model)
    model.to_empty(device="cpu").load_state_dict(saved)
    pdp_fx.step(model)
    assert pruned_counts(model) == counts
    pdp_fx.convert(model)
