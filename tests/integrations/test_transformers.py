"""The callback for the Trainer of transformers in real runs on the CPU."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import pdp_fx
from pdp_fx import Channels, PruneSpec, Schedule, StateError, Unstructured
from pdp_fx.schedule import Unit
from tests.training.nets import pruned_counts, state

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
    )
    from transformers.integrations.neftune import neftune_post_forward_hook

    from pdp_fx.integrations.transformers import PruningCallback

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=3,  # pyright: ignore[reportCallIssue]
)


def examples(count: int = 32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (count, 12), generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
        for row, label in zip(tokens, labels, strict=True)
    ]


def prepared(per: Unit, epsilon: float = 0.25) -> fx.GraphModule:
    """A tiny BERT without its embeddings and its classifier, as the paper prunes BERT."""
    torch.manual_seed(0)
    spec = PruneSpec(
        Unstructured(0.8), {"bert.embeddings": None, "classifier": None}, Schedule(1, epsilon, per)
    )
    inputs = {name: torch.stack([row[name] for row in examples(2)]) for name in examples(1)[0]}
    return pdp_fx.prepare(BertForSequenceClassification(TINY), spec, inputs)


def train(
    model: torch.nn.Module,
    folder: Path,
    epochs: int,
    resume: bool | str = False,
    data: Any = None,
    **given: Any,
) -> None:
    options: dict[str, Any] = {"save_strategy": "no"} | given
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="constant",
        logging_strategy="no",
        **options,
    )
    runner = Trainer(model, arguments, train_dataset=data or examples(), callbacks=[PruningCallback()])
    runner.train(resume_from_checkpoint=resume)


def test_a_schedule_of_epochs_advances_once_an_epoch(tmp_path: Path) -> None:
    model = prepared("epoch")
    train(model, tmp_path, 3)
    assert int(state(model).counter) == 3
    assert sum(pruned_counts(model)) > 0


@pytest.mark.long
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 8), (2, 4)])
def test_a_schedule_of_steps_counts_steps_of_the_optimizer(
    tmp_path: Path, accumulate: int, steps: int
) -> None:
    model = prepared("step")
    train(model, tmp_path, 2, gradient_accumulation_steps=accumulate)
    assert int(state(model).counter) == steps


@pytest.mark.long
def test_resuming_from_a_checkpoint_of_the_trainer_goes_on_in_the_ramp(tmp_path: Path) -> None:
    whole, first, second = (prepared("step", 0.05) for _ in range(3))
    train(whole, tmp_path / "whole", 3)
    train(first, tmp_path / "parts", 2, save_strategy="epoch")
    train(second, tmp_path / "parts", 3, resume=True)
    assert int(state(second).counter) == int(state(whole).counter) == 12
    assert pruned_counts(second) == pruned_counts(whole)


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 4, 6])
def test_no_epoch_is_lost_or_counted_twice_whatever_checkpoint_is_resumed(tmp_path: Path, step: int) -> None:
    whole, first, second = (prepared("epoch", 0.2) for _ in range(3))
    train(whole, tmp_path / "whole", 3)
    train(first, tmp_path / "parts", 2, save_strategy="steps", save_steps=2)
    train(second, tmp_path / "parts", 3, resume=str(tmp_path / f"parts/checkpoint-{step}"))
    assert int(state(second).counter) == int(state(whole).counter) == 3
    assert pruned_counts(second) == pruned_counts(whole)


@pytest.mark.long
def test_an_epoch_that_the_training_ends_in_counts_where_it_is_finished(tmp_path: Path) -> None:
    whole, first, second = (prepared("epoch", 0.2) for _ in range(3))
    train(whole, tmp_path / "whole", 3)
    train(first, tmp_path / "parts", 3, save_strategy="epoch", max_steps=6)
    assert int(state(first).counter) == 1
    train(second, tmp_path / "parts", 3, resume=str(tmp_path / "parts/checkpoint-6"))
    assert int(state(second).counter) == int(state(whole).counter) == 3
    assert pruned_counts(second) == pruned_counts(whole)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_epoch_counts_once_however_its_batches_are_accumulated(tmp_path: Path, accumulate: int) -> None:
    model = prepared("epoch")
    train(model, tmp_path, 3, gradient_accumulation_steps=accumulate)
    assert int(state(model).counter) == 3


def test_a_model_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="holds no prepared model"):
        train(BertForSequenceClassification(TINY), tmp_path, 1)


class Tied(torch.nn.Module):
    """Tokens in and out by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.head(self.table(input_ids)).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(found, labels)}


def tied() -> fx.GraphModule:
    inputs = {name: torch.stack([row[name] for row in examples(2)]) for name in ("input_ids", "labels")}
    return pdp_fx.prepare(Tied(), PruneSpec(Unstructured(0.5)), inputs)


def test_checkpoints_that_cannot_be_written_are_told_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match=r"table.weight and head.weight are one parameter"),
        pytest.raises(RuntimeError, match="share memory"),
    ):
        train(tied(), tmp_path, 1, save_strategy="epoch")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the trainer's checkpoints")
        train(tied(), tmp_path, 1)
        train(prepared("epoch"), tmp_path, 1, save_strategy="epoch")


@pytest.mark.parametrize("asked", [{"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0}])
def test_what_a_trainer_would_do_to_the_modules_of_a_graph_is_refused(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    with pytest.raises(StateError, match=r"before prepare, and leave \w+ out of the TrainingArguments"):
        train(prepared("epoch"), tmp_path, 1, **asked)


def test_noise_and_gradient_checkpointing_that_the_model_had_before_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(TINY)
    model.gradient_checkpointing_enable()
    embeddings: Any = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = 5.0
    embeddings.register_forward_hook(neftune_post_forward_hook)
    inputs = {name: torch.stack([row[name] for row in examples(2)]) for name in examples(1)[0]}
    gm = pdp_fx.prepare(model, PruneSpec(Unstructured(0.8), schedule=Schedule(1, 0.25)), inputs)
    assert gm.code.count("torch.utils.checkpoint.checkpoint(") == TINY.num_hidden_layers
    losses = list[Tensor]()
    for one in (model, gm):
        torch.manual_seed(0)
        losses.append(one.train()(**inputs)["loss"])
    assert torch.equal(*losses)
    train(gm, tmp_path, 2)
    assert sum(pruned_counts(gm)) > 0


def test_labels_are_smoothed_with_the_config_of_the_model(tmp_path: Path) -> None:
    inputs = {
        name: torch.stack([row[name] for row in examples(2)]) for name in ("input_ids", "attention_mask")
    }
    model = BertForSequenceClassification(TINY)
    gm = pdp_fx.prepare(model, PruneSpec(Unstructured(0.8), schedule=Schedule(1, 0.25)), inputs)
    vars(gm)["config"] = model.config
    train(gm, tmp_path, 2, label_smoothing_factor=0.1)
    assert sum(pruned_counts(gm)) > 0


def test_a_model_generates_with_the_forward_of_the_converted_one() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.5,
    )
    model: Any = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 64, (2, 8))
    spec = PruneSpec(Channels(ratio=0.5), schedule=Schedule(start=0, epsilon=1.0))
    gm = pdp_fx.prepare(model, spec, {"input_ids": tokens})
    pdp_fx.step(gm)
    small = pdp_fx.convert(gm)
    wanted = tokens
    for _ in range(6):
        wanted = torch.cat([wanted, gm.eval()(input_ids=wanted).logits[:, -1:].argmax(-1)], 1)
    assert not torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), wanted)
    model.forward = lambda input_ids, **_: small(input_ids=input_ids)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), wanted)


def test_a_pruned_language_model_generates_as_its_graph_does() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
    model: Any = GPT2LMHeadModel(config)
    ids = torch.randint(64, (2, 6))
    spec = PruneSpec(Channels(0.5), schedule=Schedule(0, 1.0), allocation="uniform")
    prepared = pdp_fx.prepare(model, spec, {"input_ids": ids})
    pdp_fx.step(prepared)
    small, own = pdp_fx.convert(prepared), pdp_fx.transplant(prepared, model)
    wanted = ids
    for _ in range(8):
        logits: Any = small(input_ids=wanted).logits
        wanted = torch.cat([wanted, logits[:, -1].argmax(-1, keepdim=True)], 1)
    given: Any = own
    got = given.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        use_cache=True,
        eos_token_id=-1,
    )
    assert torch.equal(got, wanted)
    assert sum(map(torch.numel, own.parameters())) < sum(map(torch.numel, model.parameters()))


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Data that does not say how long it is."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(examples())


@pytest.mark.long
def test_an_epoch_in_which_a_resumed_training_only_skips_does_not_count(tmp_path: Path) -> None:
    counters: list[int] = []
    for resume in (False, str(tmp_path / "checkpoint-6")):
        model = prepared("epoch")
        train(model, tmp_path, 1, resume, data=Stream(), max_steps=15, save_strategy="steps", save_steps=6)
        counters.append(int(state(model).counter))
    assert counters == [3, 3]
