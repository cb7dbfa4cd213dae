"""The shared loop and the methods in it: what is asked for comes out, and a stopped run goes on alike."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pdp_fx
from benchmarks.data import Batches, Images
from benchmarks.methods import METHODS, Budget, Method
from benchmarks.training import Settings, Trainer, accuracy, falling, own_parameters
from pdp_fx import MaskPolicy

SEARCHED = ("str", "cs")
EPOCHS = 8
SIZES = {"0": 3 * 8 * 9, "3": 8 * 16 * 9}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


@pytest.fixture
def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (96,), generator=generator)
    noise = torch.randint(0, 60, (96, 32, 32, 3), generator=generator)
    return Batches(Images((noise + 45 * labels[:, None, None, None]).to(torch.uint8), labels), 16, seed=0)


def trainer(name: str, batches: Batches, block: str = "own", ratio: float = 0.8) -> Trainer:
    budget = Budget(EPOCHS, len(batches))
    method: Method = METHODS[name](budget, None)
    common = {"0": (100, SIZES["0"]), "3": (1000, SIZES["3"])} if block == "common" else None
    spec = method.spec(ratio, {"8": None}, common)
    model = pdp_fx.prepare(net(), spec, torch.zeros(2, 3, 32, 32))
    return Trainer(model, method, budget, Settings(rate=0.1))


def finished(run: Trainer, batches: Batches) -> Trainer:
    while run.done < run.budget.epochs:
        run.epoch(batches)
    return run


def zeros(model: nn.Module) -> list[int]:
    return [int((model.get_parameter(f"{layer}.weight") == 0).sum()) for layer in SIZES]


@pytest.mark.long
@pytest.mark.parametrize("block", ["own", "common"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in SEARCHED])
def test_every_method_ends_at_the_sparsity_that_was_asked(name: str, block: str, batches: Batches) -> None:
    run = finished(trainer(name, batches, block), batches)
    found = zeros(pdp_fx.convert(run.model))
    total = sum(SIZES.values())
    if block == "common":
        assert found == [100, 1000]
    elif METHODS[name](run.budget, None).allocation == "uniform":
        assert found == [round(0.8 * size) for size in SIZES.values()]
    else:
        assert abs(sum(found) - 0.8 * total) <= 1
    assert run.losses[-1] < run.losses[0]
    assert run.pruned[-1] == pytest.approx(sum(found) / total)
    assert max(run.flips) > 0 or name == "dnw"


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_the_converted_model_is_the_model_in_eval_mode(name: str, batches: Batches) -> None:
    run = finished(trainer(name, batches), batches)
    images = Images(batches.padded[:, 4:-4, 4:-4], batches.labels)
    hard = accuracy(run.model, batches, images)
    assert hard == accuracy(pdp_fx.convert(run.model), batches, images)
    # Four classes; a few epochs are not enough for every method to be much above chance.
    assert 0.2 <= accuracy(run.model, batches, images, soft=True) <= 1
    assert bool(own_parameters(run.model)) == (name in ("str", "cs", "optg", "movement"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["dense", *METHODS])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(name: str, batches: Batches, tmp_path: Path) -> None:
    def fresh() -> Trainer:
        if name == "dense":
            return Trainer(net(), None, Budget(EPOCHS, len(batches)), Settings(rate=0.1))
        return trainer(name, batches)

    whole, stopped, resumed = fresh(), fresh(), fresh()
    finished(whole, batches)
    for _ in range(5):
        stopped.epoch(batches)
    stopped.save(tmp_path / "state.pt")
    resumed.load(tmp_path / "state.pt")
    assert resumed.done == 5
    finished(resumed, batches)
    for (key, expected), found in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
    assert resumed.flips == pytest.approx(whole.flips, abs=2e-3)
    assert len(whole.flips) == len(whole.pruned) == (0 if name == "dense" else EPOCHS)
    assert [found["epoch"] for found in resumed.weights] == [2, 4, 6, 8]


@pytest.mark.parametrize("name", SEARCHED)
def test_a_knob_decides_the_sparsity_of_methods_without_a_target(name: str, batches: Batches) -> None:
    budget = Budget(EPOCHS, len(batches))
    found: list[int] = []
    for knob in {"str": (-4.0, -2.0, -1.0), "cs": (0.3, 0.0, -0.3)}[name]:
        method = METHODS[name](budget, knob)
        model = pdp_fx.prepare(net(), method.spec(0.5, {"8": None}), torch.zeros(2, 3, 32, 32))
        finished(Trainer(model, method, budget, Settings(rate=0.1)), batches)
        found.append(sum(int(zero.sum()) for zero in pruned(model)))
    assert found == sorted(found)
    assert found[0] < found[-1]


def pruned(model: nn.Module) -> list[Tensor]:
    found = [module for module in model.modules() if isinstance(module, MaskPolicy)]
    weights = [model.get_parameter(mask.parameters_read[0]) for mask in found]
    return [mask.pruned(weight) for mask, weight in zip(found, weights, strict=True)]


def test_the_rate_rises_and_falls_and_starts_anew_after_a_round(batches: Batches) -> None:
    assert [falling(step, 0, 10, 2) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert falling(6, 0, 10, 2) == pytest.approx(0.5)
    assert falling(9, 0, 10, 2) == pytest.approx(0.5 * (1 + torch.pi * 0 - 0.9238795))
    run = trainer("cs", batches)
    assert run.rate_factor(0) == run.rate_factor(4 * len(batches)) == 1.0
    assert run.rate_factor(4 * len(batches) - 1) < 0.05


def test_cs_goes_back_to_its_early_weights_when_it_draws_its_ticket(batches: Batches) -> None:
    run = trainer("cs", batches)
    early: dict[str, Tensor] = {}
    while run.done < 4:
        if run.done == 2:
            early = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.epoch(batches)
    scores = [parameter.detach().clone() for parameter in own_parameters(run.model)]
    run.settings = Settings(rate=0.0)
    run.epoch(batches)
    for name, parameter in run.model.named_parameters():
        if not name.startswith("pdp."):
            assert torch.equal(parameter, early[name]), name
    assert all(torch.equal(a, b) for a, b in zip(scores, own_parameters(run.model), strict=True))


def test_all_methods_start_from_the_same_weights_and_see_the_same_batches(batches: Batches) -> None:
    runs = [trainer(name, batches) for name in ("pdp", "st3", "optg")]
    losses = [run.epoch(batches) for run in runs]
    # Before their ramps these three are dense nets.
    assert losses == pytest.approx(losses[:1] * 3, rel=0.2)
    first = [next(iter(batches.epoch(0)))[0] for _ in range(2)]
    assert torch.equal(*first)


@pytest.mark.parametrize(("name", "adam"), [("optg", True), ("cs", False), ("movement", True)])
def test_scores_at_the_rate_of_the_weights_have_their_optimizer(
    name: str, adam: bool, batches: Batches
) -> None:
    """Those with a rate of their own have the one that their paper names."""
    run = trainer(name, batches)
    run.settings = Settings(rate=0.1, adam=True)
    weights, scores = run.fresh_optimizers()
    assert isinstance(weights, torch.optim.AdamW)
    assert isinstance(scores, torch.optim.Adam) == adam
