"""A callback for the Trainer of Hugging Face transformers that calls `pdp_fx.step` at the right times."""

import warnings
from collections import defaultdict
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from pdp_fx.errors import StateError
from pdp_fx.integrations.advance import advance


class PruningCallback(TrainerCallback):
    """Advances the schedule of the model that the trainer trains.

    Once after each epoch or each step of the optimizer, as the spec's schedule is written. Resuming from a
    checkpoint of the trainer resumes the schedule, which is part of the model's state. An epoch is over with
    its last step, for a checkpoint of that step is one from which the next epoch begins. Of data that does
    not say how long it is the last step of an epoch cannot be told: there an epoch that the training ends
    with is not counted. The loss stays yours: with `pruned_decay`, `compute_loss` adds `pdp_fx.penalty`.
    Where the trainer reads the model's config, as for label smoothing, set it:
    ``prepared.config = model.config``.

    Example:
        trainer = Trainer(prepared, arguments, train_dataset=data, callbacks=[PruningCallback()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._counted, self._stepped = False, False

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Refuse what the trainer would do to modules of the model that a graph no longer calls.

        Raises:
            StateError: the arguments ask for gradient checkpointing or for NEFTune.
        """
        if args.gradient_checkpointing:
            raise StateError(
                "a prepared model recomputes in backward what the model did when it was prepared: call "
                "model.gradient_checkpointing_enable() before prepare, and leave gradient_checkpointing out "
                "of the TrainingArguments"
            )
        if args.neftune_noise_alpha is not None:
            raise StateError(
                "a prepared model has the hooks that the model had when it was prepared: set "
                "neftune_noise_alpha on model.get_input_embeddings() and register the hook of NEFTune, "
                "transformers.integrations.neftune.neftune_post_forward_hook, there before prepare, and "
                "leave neftune_noise_alpha out of the TrainingArguments"
            )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Warn of checkpoints that will fail: the trainer writes them in a format without tied weights."""
        tied = _tied(kwargs["model"])
        if tied and args.save_strategy != SaveStrategy.NO:
            warnings.warn(
                f"the trainer's checkpoints will fail, because {' and '.join(tied)} are one parameter, and "
                "safetensors writes none that has two names: untie them before prepare, or train with "
                "save_strategy='no' and save the state_dict with torch.save",
                stacklevel=2,
            )

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Begin an epoch that has not been counted."""
        self._counted, self._stepped = False, False

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts steps, and in the last step of an epoch one that counts epochs."""
        self._stepped = True
        advance(kwargs["model"], "step")
        if float(state.epoch).is_integer():
            self._count_epoch(kwargs["model"])

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Advance a schedule that counts epochs, if `on_step_end` could not tell which step was the last.

        An epoch that the training ends in is not counted: a run that goes on from there trains its rest. Nor
        is one without a step, which a resumed training has only skipped.
        """
        if self._stepped and not control.should_training_stop:
            self._count_epoch(kwargs["model"])

    def _count_epoch(self, model: nn.Module) -> None:
        if not self._counted:
            advance(model, "epoch")
        self._counted = True


def _tied(model: nn.Module) -> list[str]:
    """The names of a parameter that the model has under several names; empty if there is none."""
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return next((found for found in names.values() if len(found) > 1), [])
