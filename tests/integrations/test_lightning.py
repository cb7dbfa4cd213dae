"""The Lightning callback in real trainer runs on the CPU."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pdp_fx
from pdp_fx import PruneSpec, Schedule, StateError, Unstructured
from pdp_fx.schedule import Unit
from tests.training.nets import Net, batch, pruned_counts, state

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

    from pdp_fx.integrations.lightning import PruningCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(LightningModule):
    """An ordinary module of a user; the prepared model is one of its attributes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classify."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Classify, for nobody."""
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def classifier(per: Unit, start: int = 1, epsilon: float = 0.25) -> Classifier:
    torch.manual_seed(0)
    spec = PruneSpec(Unstructured(0.8), schedule=Schedule(start, epsilon, per))
    return Classifier(pdp_fx.prepare(Net(), spec, batch()[0]))


class Two(LightningModule):
    """A module of a user with two prepared models, which count in different units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = classifier("epoch").net, classifier("step", start=2).net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classify by both."""
        images, labels = batch
        return functional.cross_entropy(self.first(images) + self.last(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.05)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(size=32)), batch_size=8)


def trainer(folder: Path, epochs: int, **options: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def counter(module: Classifier) -> int:
    return int(state(module.net).counter)


def test_a_schedule_of_epochs_advances_once_an_epoch(tmp_path: Path) -> None:
    module = classifier("epoch")
    trainer(tmp_path, 3, callbacks=[PruningCallback()], enable_checkpointing=False).fit(module, loader())
    assert counter(module) == 3
    assert sum(pruned_counts(module.net)) > 0


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 8), (2, 4)])
def test_a_schedule_of_steps_counts_steps_of_the_optimizer(
    tmp_path: Path, accumulate: int, steps: int
) -> None:
    module = classifier("step")
    run = trainer(
        tmp_path,
        2,
        callbacks=[PruningCallback()],
        enable_checkpointing=False,
        accumulate_grad_batches=accumulate,
    )
    run.fit(module, loader())
    assert counter(module) == steps


def test_resuming_from_a_checkpoint_of_the_trainer_goes_on_in_the_ramp(tmp_path: Path) -> None:
    whole = classifier("step", epsilon=0.05)
    trainer(tmp_path, 3, callbacks=[PruningCallback()], enable_checkpointing=False).fit(whole, loader())
    first = classifier("step", epsilon=0.05)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, 2, callbacks=[PruningCallback(), keep]).fit(first, loader())
    second = classifier("step", epsilon=0.05)
    resumed = trainer(tmp_path, 3, callbacks=[PruningCallback()], enable_checkpointing=False)
    resumed.fit(second, loader(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert counter(second) == counter(whole) == 12
    for name, tensor in whole.state_dict().items():
        assert second.state_dict()[name].equal(tensor), name


@pytest.mark.parametrize(
    "saved",
    [{"every_n_train_steps": 4}, {"save_on_train_epoch_end": False}, {"save_on_train_epoch_end": True}],
)
def test_no_epoch_is_lost_or_counted_twice_whenever_a_checkpoint_is_written(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    whole, first, second = (classifier("epoch", epsilon=0.2) for _ in range(3))
    trainer(tmp_path, 4, callbacks=[PruningCallback()], enable_checkpointing=False).fit(whole, loader())
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True, **saved)
    trainer(tmp_path, 2, callbacks=[PruningCallback(), keep]).fit(first, loader(), loader())
    resumed = trainer(tmp_path, 4, callbacks=[PruningCallback()], enable_checkpointing=False)
    resumed.fit(second, loader(), loader(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert counter(second) == counter(whole) == 4
    for name, tensor in whole.state_dict().items():
        assert second.state_dict()[name].equal(tensor), name


@pytest.mark.parametrize(("per", "expected"), [("epoch", 3), ("step", 12)])
@pytest.mark.parametrize("first", [True, False])
def test_the_epoch_that_renews_batch_norm_after_averaging_does_not_count(
    tmp_path: Path, per: Unit, expected: int, first: bool
) -> None:
    module = classifier(per, epsilon=0.05)
    callbacks = [PruningCallback(), StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
    runner = trainer(tmp_path, 3, callbacks=callbacks if first else callbacks[::-1])
    runner.fit(module, loader())
    assert counter(module) == expected
    small = pdp_fx.convert(module.net)
    torch.testing.assert_close(small(batch()[0]), module.net.eval()(batch()[0]), rtol=1e-4, atol=1e-5)


def test_one_callback_serves_two_trainings(tmp_path: Path) -> None:
    module, callback = classifier("epoch"), PruningCallback()
    for _ in range(2):
        trainer(tmp_path, 2, callbacks=[callback], enable_checkpointing=False).fit(module, loader())
    assert counter(module) == 4


def test_a_module_without_a_prepared_model_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, callbacks=[PruningCallback()], enable_checkpointing=False)
    with pytest.raises(StateError, match="holds no prepared model"):
        run.fit(Classifier(Net()), loader())


def test_averages_of_the_schedule_are_refused_before_the_training(tmp_path: Path) -> None:
    averaging: Any = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    module = classifier("step")
    kept = averaging.EMAWeightAveraging(decay=0.5, use_buffers=False)
    trainer(tmp_path, 2, callbacks=[PruningCallback(), kept]).fit(module, loader())
    prepared = module.net
    assert state(prepared).share == 1
    pdp_fx.convert(prepared)
    callbacks = [PruningCallback(), averaging.EMAWeightAveraging(decay=0.5)]
    with pytest.raises(StateError, match=r"write EMAWeightAveraging\(\.\.\., use_buffers=False\)"):
        trainer(tmp_path, 2, callbacks=callbacks).fit(classifier("step"), loader())


def test_the_callback_steps_each_prepared_model(tmp_path: Path) -> None:
    model = Two()
    trainer(tmp_path, 2, callbacks=[PruningCallback()], enable_checkpointing=False).fit(model, loader())
    assert [net.get_submodule("pdp").get_buffer("counter").item() for net in (model.first, model.last)] == [
        2,
        8,
    ]


class ByHand(LightningModule):
    """A module of a user who steps two optimizers, one three times a batch, one every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.often, self.seldom = classifier("step").net, classifier("step").net

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Classify by each."""
        optimizers: Any = self.optimizers()
        often, seldom = optimizers
        for optimizer, net in [(often, self.often)] * 3 + [(seldom, self.seldom)] * (batch_idx % 2):
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Plain SGD."""
        return [torch.optim.SGD(net.parameters(), 0.05) for net in (self.often, self.seldom)]


def test_each_schedule_counts_the_steps_of_the_optimizer_of_its_model(tmp_path: Path) -> None:
    module, callback = ByHand(), PruningCallback()
    for trainings in (1, 2):
        trainer(tmp_path, 1, callbacks=[callback], enable_checkpointing=False).fit(module, loader())
        counters = [int(state(net).counter) for net in (module.often, module.seldom)]
        assert counters == [12 * trainings, 2 * trainings]
