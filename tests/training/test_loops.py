"""What real training loops do to a model, one test each."""

import copy
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import pdp_fx
from pdp_fx import PruneSpec, Schedule, StateError
from pdp_fx.spec import Rule
from tests.training.nets import RAMP, RULES, Net, batch, prepared, pruned_counts, sgd, state, training_step

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def in_the_ramp(rule: Rule) -> tuple[fx.GraphModule, torch.optim.Optimizer]:
    """A model after three steps: half of the ramp is over."""
    model = prepared(rule)
    optimizer = sgd(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
    return model, optimizer


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_same_tensors(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.equal(theirs[name]), name


@every_rule
def test_until_the_ramp_the_training_is_bit_for_bit_the_dense_one(rule: Rule) -> None:
    model = prepared(rule, Schedule(start=100, epsilon=0.5, per="step"))
    torch.manual_seed(0)
    dense = Net()
    dense_sgd, optimizer = sgd(dense), sgd(model)
    for seed in range(3):
        images, labels = batch(seed)
        loss = functional.cross_entropy(dense(images), labels)
        dense_sgd.zero_grad()
        loss.backward()
        dense_sgd.step()
        assert training_step(model, optimizer, seed) == loss.item()
    for name, parameter in dense.named_parameters():
        assert model.get_parameter(name).equal(parameter)


@every_rule
def test_accumulated_gradients_are_those_of_the_whole_batch(rule: Rule) -> None:
    model, optimizer = in_the_ramp(rule)
    model.eval()  # BatchNorm would see other batches
    for _, mask in state(model).mask_items():
        mask.train()
    images, labels = batch(7)
    optimizer.zero_grad()
    functional.cross_entropy(model(images), labels).backward()
    expected = gradients(model)
    optimizer.zero_grad()
    for start in range(0, 16, 4):
        part = slice(start, start + 4)
        (functional.cross_entropy(model(images[part]), labels[part]) / 4).backward()
    for found, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@every_rule
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(rule: Rule, reentrant: bool) -> None:
    model, optimizer = in_the_ramp(rule)
    twin = copy.deepcopy(model)
    images, labels = batch(7)
    optimizer.zero_grad()
    functional.cross_entropy(model(images), labels).backward()
    recomputed = checkpoint(twin, images.clone().requires_grad_(), use_reentrant=reentrant)
    assert isinstance(recomputed, torch.Tensor)
    twin.zero_grad()
    functional.cross_entropy(recomputed, labels).backward()
    for found, wanted in zip(gradients(twin), gradients(model), strict=True):
        assert found.equal(wanted)


@every_rule
def test_two_forward_passes_in_a_step_share_their_masks(rule: Rule) -> None:
    model, optimizer = in_the_ramp(rule)
    first, second = batch(7)[0], batch(8)[0]
    loss = functional.mse_loss(model(first), model(second))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    together = model.eval()(torch.cat((first, second)))
    torch.testing.assert_close(torch.cat((model(first), model(second))), together, rtol=1e-5, atol=1e-6)


@every_rule
@pytest.mark.parametrize("tau_end", [None, 1e-6])
def test_a_step_before_the_backward_pass_leaves_it_the_masks_of_the_forward_pass(
    rule: Rule, tau_end: float | None
) -> None:
    model = prepared(rule, tau_end=tau_end)
    for seed in range(3):
        training_step(model, sgd(model), seed)
    images, labels = batch(7)
    expected, found = copy.deepcopy(model), copy.deepcopy(model)
    functional.cross_entropy(expected(images), labels).backward()
    loss = functional.cross_entropy(found(images), labels)
    pdp_fx.step(found)
    loss.backward()
    for mine, theirs in zip(gradients(found), gradients(expected), strict=True):
        assert mine.equal(theirs)


@every_rule
def test_a_gradient_penalty_can_be_trained(rule: Rule) -> None:
    model, optimizer = in_the_ramp(rule)
    images = batch(7)[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    optimizer.zero_grad()
    slope.square().sum().backward()
    assert sum(bool(grad.any()) for grad in gradients(model)) > 3


@every_rule
def test_averaged_weights_follow_and_convert(rule: Rule) -> None:
    model = prepared(rule)
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # pyright: ignore[reportUnknownArgumentType]
    for seed in range(6):
        training_step(model, optimizer, seed)
        average.update_parameters(model)
    assert pruned_counts(average.module) == pruned_counts(model)
    small = pdp_fx.convert(average)
    images = batch()[0]
    torch.testing.assert_close(small(images), average.eval()(images), rtol=1e-5, atol=1e-5)


@every_rule
def test_an_average_that_copies_the_numbers_of_a_state_dict_prunes_like_its_model(rule: Rule) -> None:
    model = prepared(rule)
    optimizer, average = sgd(model), copy.deepcopy(model)
    for seed in range(3):
        training_step(model, optimizer, seed)
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(mine.lerp(theirs, 0.5) if mine.is_floating_point() else theirs)
    assert 0 < sum(pruned_counts(average)) == sum(pruned_counts(model))
    small = pdp_fx.convert(average)
    images = batch()[0]
    torch.testing.assert_close(small(images), average.eval()(images), rtol=1e-5, atol=1e-5)


@every_rule
def test_an_average_of_the_parameters_alone_is_refused_and_can_be_mended(rule: Rule) -> None:
    model = prepared(rule)
    optimizer, average = sgd(model), copy.deepcopy(model)
    for seed in range(6):
        training_step(model, optimizer, seed)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    with pytest.raises(StateError, match=r"average\.pdp\.load_state_dict"):
        pdp_fx.convert(average)
    state(average).load_state_dict(state(model).state_dict())
    pdp_fx.convert(average)
    assert pruned_counts(average) == pruned_counts(model)


def test_an_average_of_the_schedule_itself_is_refused_and_can_be_mended() -> None:
    model = prepared(RULES["unstructured"])
    optimizer = sgd(model)
    average = AveragedModel(model, use_buffers=True)
    for seed in range(8):
        training_step(model, optimizer, seed)
        average.update_parameters(model)
    with pytest.raises(StateError, match=r"average\.module\.pdp\.load_state_dict"):
        pdp_fx.convert(average)
    state(average.module).load_state_dict(state(model).state_dict())
    small = pdp_fx.convert(average)
    zeros = sum(int((parameter == 0).sum()) for parameter in small.parameters() if parameter.ndim > 1)
    assert zeros == sum(pruned_counts(model))


@every_rule
def test_a_count_that_is_off_by_one_is_refused(rule: Rule) -> None:
    model, _ = in_the_ramp(rule)
    mask = state(model).mask_items()[0][1]
    mask.count.sub_(1)
    with pytest.raises(StateError, match="which is not what its schedule says"):
        pdp_fx.convert(model)


@every_rule
def test_a_state_that_was_cast_and_cast_back_is_refused_though_its_counts_are_right(rule: Rule) -> None:
    model, _ = in_the_ramp(rule)
    for buffer in state(model).buffers():
        buffer.copy_(buffer.float())
    with pytest.raises(StateError, match="were averaged, cast to another type or edited"):
        pdp_fx.convert(model)


@every_rule
def test_a_deep_copy_trains_on_by_itself(rule: Rule) -> None:
    model, optimizer = in_the_ramp(rule)
    twin = copy.deepcopy(model)
    twin_sgd = sgd(twin)
    twin_sgd.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (3, 4, 5):
        assert training_step(twin, twin_sgd, seed) == training_step(model, optimizer, seed)
    assert_same_tensors(twin, model)


@every_rule
def test_a_whole_model_survives_torch_save(rule: Rule, tmp_path: Path) -> None:
    model, _ = in_the_ramp(rule)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same_tensors(again, model)
    images = batch(7)[0]
    assert again(images).equal(model(images))


@every_rule
def test_a_model_that_went_to_another_process_converts_on_both_sides(rule: Rule) -> None:
    model, _ = in_the_ramp(rule)
    sent, images = pickle.loads(ForkingPickler.dumps(model)), batch(7)[0]
    for side in (model, sent):
        small = pdp_fx.convert(side)
        torch.testing.assert_close(small(images), side.eval()(images), rtol=1e-5, atol=1e-5)
    pdp_fx.step(sent)
    assert int(state(model).counter) == int(state(sent).counter) == 4


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_masks_in_full_precision(rule: Rule, dtype: torch.dtype) -> None:
    model, optimizer = in_the_ramp(rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    images, labels = batch(7)
    exact = functional.cross_entropy(copy.deepcopy(model)(images), labels).item()
    with torch.autocast("cpu", dtype):
        loss = functional.cross_entropy(model(images), labels)
    assert loss.item() == pytest.approx(exact, rel=0.02)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    pdp_fx.step(model)
    assert all(not new.equal(old) for new, old in zip(model.parameters(), before, strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@every_rule
def test_an_overflow_under_the_scaler_skips_the_step_and_leaves_the_model_alone(rule: Rule) -> None:
    model, optimizer = in_the_ramp(rule)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e30)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images, labels = batch(7)
    with torch.autocast("cpu", torch.float16):
        loss = functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(new.equal(old) for new, old in zip(model.parameters(), before, strict=True))


@every_rule
def test_a_model_in_bfloat16_keeps_its_counts_exact(rule: Rule) -> None:
    model = prepared(rule).bfloat16()
    optimizer = sgd(model)
    images, labels = batch()
    for _ in range(6):
        loss = functional.cross_entropy(model(images.bfloat16()).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pdp_fx.step(model)
    counts = [int(mask.target) for _, mask in state(model).mask_items()]
    if rule != RULES["n:m"]:
        assert pruned_counts(model) == counts


@every_rule
def test_channels_last_gives_the_same_training(rule: Rule) -> None:
    plain, last = prepared(rule), prepared(rule).to(memory_format=torch.channels_last)
    plain_sgd, last_sgd = sgd(plain), sgd(last)
    for seed in range(6):
        images, labels = batch(seed)
        loss = functional.cross_entropy(last(images.to(memory_format=torch.channels_last)), labels)
        last_sgd.zero_grad()
        loss.backward()
        last_sgd.step()
        pdp_fx.step(last)
        assert loss.item() == pytest.approx(training_step(plain, plain_sgd, seed), rel=1e-4)
    assert last.get_parameter("inner.weight").is_contiguous(memory_format=torch.channels_last)
    assert pruned_counts(last) == pruned_counts(plain)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_fused_and_foreach_optimizers_train_like_the_plain_one(
    make: Callable[..., torch.optim.Optimizer], kind: str
) -> None:
    plain, fast = prepared(RULES["unstructured"]), prepared(RULES["unstructured"])
    plain_optimizer = make(plain.parameters(), lr=0.01, foreach=False)
    fast_optimizer = make(fast.parameters(), lr=0.01, **{kind: True})
    for seed in range(6):
        expected = training_step(plain, plain_optimizer, seed)
        assert training_step(fast, fast_optimizer, seed) == pytest.approx(expected, rel=1e-4)
    assert pruned_counts(fast) == pruned_counts(plain)


@every_rule
def test_an_optimizer_built_before_prepare_trains_the_prepared_model(rule: Rule) -> None:
    after = prepared(rule)
    torch.manual_seed(0)
    net = Net()
    early = sgd(net)
    before = pdp_fx.prepare(net, PruneSpec(rule, schedule=RAMP), batch()[0])
    late = sgd(after)
    for seed in range(6):
        assert training_step(before, early, seed) == training_step(after, late, seed)
    assert_same_tensors(before, after)


def test_parameter_groups_by_name_and_by_dimension_work_as_on_the_dense_model() -> None:
    model = prepared(RULES["channels"])
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1)
    losses = [training_step(model, optimizer, 0) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_an_optimizer_that_writes_through_data_never_meets_a_stale_mask() -> None:
    by_hand, plain = prepared(RULES["unstructured"]), prepared(RULES["unstructured"])
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for seed in range(6):
        images, labels = batch(seed)
        loss = functional.cross_entropy(by_hand(images), labels)
        by_hand.zero_grad()
        loss.backward()
        for parameter in by_hand.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(0.1 * parameter.grad)
        pdp_fx.step(by_hand)
        assert loss.item() == pytest.approx(training_step(plain, optimizer, seed), rel=1e-6)


def test_weights_swapped_through_data_for_evaluation_get_their_own_masks() -> None:
    model, _ = in_the_ramp(RULES["unstructured"])
    model.eval()
    images = batch()[0]
    expected = model(images)
    saved = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0) * 2)
    swapped = copy.deepcopy(model)
    assert model(images).equal(swapped(images))
    for parameter, old in zip(model.parameters(), saved, strict=True):
        parameter.data.copy_(old)
    assert model(images).equal(expected)
