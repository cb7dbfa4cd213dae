"""A callback for the Trainer of Hugging Face transformers that calls `pdp_fx.step` at the right times."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pdp_fx.integrations.advance import advance


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
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts steps."""
        advance(kwargs["model"], "step")

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts epochs."""
        advance(kwargs["model"], "epoch")
