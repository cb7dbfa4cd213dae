"""The thresholds of one forward pass are found together; what a GPU does is stood in for on the CPU."""

import copy
import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import pdp_fx
from pdp_fx.masks import WeightMask
from pdp_fx.ops import gpu
from pdp_fx.ops.threshold import threshold

SPEC = pdp_fx.PruneSpec(pdp_fx.Unstructured(0.5), schedule=pdp_fx.Schedule(start=0, epsilon=0.5))
INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Tables:
    """Stands in for `gpu.thresholds`, and notes how many layers were asked for at a time."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.weights: dict[int, Tensor] = {}

    def table(self, weights: Sequence[Tensor], last: gpu.Table | None = None) -> gpu.Table:
        self.weights.update((weight.data_ptr(), weight) for weight in weights)
        key = tuple((weight.data_ptr(), weight.numel()) for weight in weights)
        return gpu.Table(key, *torch.empty(4))

    def thresholds(self, where: gpu.Table, counts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        self.asked.append(len(where.key))
        pairs = zip(where.key, counts, strict=True)
        return torch.stack([threshold(self.weights[address], count) for (address, _), count in pairs])


def masked(weight: Tensor, t: Tensor, tau: float) -> Tensor:
    return weight * torch.sigmoid((weight.square() - t * t.abs()) / tau)


def gradient(weight: Tensor, t: Tensor, tau: float, upstream: Tensor) -> Tensor:
    mask = torch.sigmoid((weight.square() - t * t.abs()) / tau)
    return (mask + 2 * weight.square() / tau * mask * (1 - mask)) * upstream


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Let masks believe that their weights are on a GPU."""
    stand_in = Tables()
    monkeypatch.setattr(gpu, "usable", lambda weight: isinstance(weight, Tensor))
    monkeypatch.setattr(gpu, "table", stand_in.table)
    monkeypatch.setattr(gpu, "thresholds", stand_in.thresholds)
    monkeypatch.setattr(gpu, "masked", masked)
    monkeypatch.setattr(gpu, "gradient", gradient)
    return stand_in


def prepared() -> fx.GraphModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model = pdp_fx.prepare(net, SPEC, INPUTS)
    pdp_fx.step(model)
    return model.train()


def masks_of(model: nn.Module) -> list[WeightMask]:
    return [module for module in model.modules() if isinstance(module, WeightMask)]


def losses(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(INPUTS).square().sum()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
    return seen


def test_from_the_second_pass_on_all_layers_are_asked_for_at_once(tables: Tables) -> None:
    losses(prepared(), 3)
    assert tables.asked == [1, 1, 1, 3, 3]


def test_training_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tables: Tables) -> None:
    together = losses(prepared(), 5)
    monkeypatch.undo()
    assert together == pytest.approx(losses(prepared(), 5), rel=1e-12)


def test_whoever_changes_a_weight_or_a_count_between_two_masks_is_seen(tables: Tables) -> None:
    model = prepared()
    losses(model, 2)
    first, second, third = masks_of(model)
    weights = [model.get_parameter(mask.parameters_read[0]) for mask in (first, second, third)]
    tables.asked.clear()
    first(weights[0])
    with torch.no_grad():
        weights[1].mul_(2)
    third.count.add_(3)
    for mask, weight in ((second, weights[1]), (third, weights[2])):
        t = threshold(weight, mask.count)
        torch.testing.assert_close(mask(weight), masked(weight, t, mask.tau.start), rtol=1e-12, atol=1e-16)
    assert tables.asked == [3, 3]


def test_a_pass_begins_anew_even_if_nobody_has_told_that_weights_changed(tables: Tables) -> None:
    model = prepared()
    losses(model, 2)
    for _ in range(2):
        tables.asked.clear()
        model(INPUTS)
        assert tables.asked == [3]
        for mask in masks_of(model):
            model.get_parameter(mask.parameters_read[0]).data.mul_(0.5)
    expected = copy.deepcopy(model)(INPUTS)
    assert model(INPUTS).equal(expected)


def test_a_freed_weight_is_left_out_until_it_is_there(tables: Tables) -> None:
    model = prepared()
    losses(model, 2)
    first, second, _ = masks_of(model)
    weight = model.get_parameter(second.parameters_read[0])
    kept, storage = weight.detach().clone(), weight.untyped_storage()
    size = storage.size()
    tables.asked.clear()
    storage.resize_(0)
    first(model.get_parameter(first.parameters_read[0]))
    storage.resize_(size)
    with torch.no_grad():
        weight.copy_(kept)
    second(weight)
    assert tables.asked == [2, 3]


def test_copies_and_loaded_models_have_their_own(tables: Tables) -> None:
    model = prepared()
    losses(model, 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        assert len({id(mask.together) for mask in masks_of(other)}) == 1
        assert masks_of(other)[0].together is not masks_of(model)[0].together
        tables.asked.clear()
        assert losses(other, 2) == losses(copy.deepcopy(model), 2)
        assert tables.asked == [1, 1, 1, 3] * 2


def test_recomputed_activations_have_the_same_gradients(tables: Tables) -> None:
    model = prepared()
    losses(model, 2)
    slopes: list[list[Tensor]] = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        loss = run(INPUTS).square().sum()
        slopes.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    for one, other in zip(*slopes, strict=True):
        assert one.equal(other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_as_the_cpu_does_without_waiting() -> None:
    model = prepared().float().cuda()
    inputs = INPUTS.float().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            loss = model(inputs).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(loss.detach())
    assert gpu.usable(next(model.parameters()))
    assert torch.stack(seen).tolist() == pytest.approx(losses(prepared(), 3), rel=1e-4)
