"""A Lightning callback that calls `pdp_fx.step` at the right times."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pdp_fx.integrations.advance import advance


class PruningCallback(Callback):
    """Advances the schedule of the prepared model inside a LightningModule.

    Once after each epoch or each step of the optimizer, as the spec's schedule is written; batches whose
    gradients are only accumulated do not count. Nothing is kept here: resuming from a checkpoint of the
    trainer resumes the schedule, which is part of the model's state.

    Example:
        trainer = Trainer(callbacks=[PruningCallback()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps_seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where the count of steps starts."""
        self._steps_seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance a schedule that counts steps, if the optimizer has made one."""
        if trainer.global_step > self._steps_seen:
            advance(pl_module, "step")
        self._steps_seen = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Advance a schedule that counts epochs."""
        advance(pl_module, "epoch")
