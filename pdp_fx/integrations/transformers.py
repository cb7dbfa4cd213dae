"""A callback for the Trainer of Hugging Face transformers that calls `pdp_fx.step` at the right times."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import pdp_fx
from pdp_fx.pruner import schedule_unit


class PruningCallback(TrainerCallback):
    """Advances the schedule of the model that the trainer trains.

    Once after each epoch or each step of the optimizer, as the spec's schedule is written. Nothing is kept
    here: resuming from a checkpoint of the trainer resumes the schedule, which is part of the model's state.

    Example:
        trainer = Trainer(prepared, arguments, train_dataset=data, callbacks=[PruningCallback()])
    """

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts steps."""
        if schedule_unit(model) == "step":
            pdp_fx.step(model)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts epochs."""
        if schedule_unit(model) == "epoch":
            pdp_fx.step(model)
