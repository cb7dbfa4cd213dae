"""A Lightning callback that calls `pdp_fx.step` at the right times."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import fx
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import pdp_fx
from pdp_fx.errors import StateError
from pdp_fx.integrations.advance import advance, counting


class PruningCallback(Callback):
    """Advances the schedule of the prepared model inside a LightningModule.

    Once after each epoch or each step of the optimizer that trains it, as the spec's schedule is written;
    batches whose gradients are only accumulated do not count, nor do steps that a gradient scaler skips. Of
    several optimizers the first counts that has a parameter of the prepared model. Resuming from a checkpoint
    of the trainer resumes the schedule, which is part of the model's state. What is kept here is for how many
    epochs it was advanced: a checkpoint from the last batch of an epoch is older than the end of the epoch,
    which the trainer does not come to again. An epoch that trains nothing, in which
    `StochasticWeightAveraging` renews statistics of batch norm, does not count. The loss stays yours: with
    `pruned_decay`, `training_step` adds `pdp_fx.penalty`.

    Example:
        trainer = Trainer(callbacks=[PruningCallback()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: list[RemovableHandle] = []
        self._epochs: int | None = None
        self._trains = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the epochs of another training.

        Raises:
            StateError: a callback averages whole numbers, too, and so would end up with no schedule at all.
        """
        self._epochs, self._trains = None, True
        callbacks: list[Any] = vars(trainer).get("callbacks", [])
        averages = [callback for callback in callbacks if vars(callback).get("_use_buffers") is True]
        if averages:
            name = type(averages[0]).__name__
            raise StateError(
                f"{name} averages buffers, and whole numbers such as those of the pruning schedule cannot be "
                f"averaged; write {name}(..., use_buffers=False), which copies them"
            )

    def state_dict(self) -> dict[str, Any]:
        """The epochs for which the schedule was advanced."""
        return {"epochs": self._epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them from a checkpoint."""
        self._epochs = state_dict["epochs"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the steps of the optimizers, and make up for an epoch whose end was not seen.

        Raises:
            StateError: nothing in the module is prepared, or an optimizer is none of torch's.
        """
        self._unhook()
        for gm in counting(pl_module, "step"):
            self._hooks.append(self._follow(gm, trainer))
        self._advance_to(trainer.current_epoch, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note whether the epoch trains anything."""
        self._trains = _trains(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance a schedule that counts epochs."""
        if self._trains:
            self._advance_to(trainer.current_epoch + 1, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the optimizers no longer."""
        self._unhook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Follow the optimizers no longer."""
        self._unhook()

    def _follow(self, gm: fx.GraphModule, trainer: Trainer) -> RemovableHandle:
        """Advance a schedule that counts steps after each step of the optimizer of its model."""
        own = set(gm.parameters())
        optimizers = trainer.optimizers
        fitting = [one for one in optimizers if any(own & {*group["params"]} for group in one.param_groups)]
        optimizer = (fitting or optimizers)[0]
        if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise StateError(
                f"a {type(optimizer).__name__} does not tell when it has made a step, as optimizers of torch "
                'do; use Schedule(per="epoch"), or call pdp_fx.step in your training_step'
            )

        def stepped(*_: Any) -> None:
            # The one step that ends an epoch without backward passes finds no gradients.
            if _trains(trainer):
                pdp_fx.step(gm)

        return optimizer.register_step_post_hook(stepped)

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _advance_to(self, epochs: int, pl_module: LightningModule) -> None:
        for _ in range(0 if self._epochs is None else epochs - self._epochs):
            advance(pl_module, "epoch")
        self._epochs = epochs


def _trains(trainer: Trainer) -> bool:
    """Whether batches are trained on, and not only looked at for statistics of batch norm."""
    return not getattr(trainer.fit_loop, "_skip_backward", False)
