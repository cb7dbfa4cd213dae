"""How the zoo makes a small model of the transformers library and its inputs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WORDS = 500
LENGTH = 12
PIXELS = 64

TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3,
                        "num_attention_heads": 4, "intermediate_size": 160}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                          "intermediate_size": 160, "image_size": PIXELS, "patch_size": 16}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A model class, the options of its configuration, and its inputs for a batch size."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]

    def build(self) -> nn.Module:
        """Build the model with random weights."""
        library = importlib.import_module("transformers")
        return getattr(library, self.model)(getattr(library, self.config)(**self.options))


def words(batch: int) -> dict[str, Any]:
    """Sentences of one length."""
    mask = torch.ones(batch, LENGTH, dtype=torch.int64)
    return {"input_ids": torch.randint(2, WORDS, (batch, LENGTH)), "attention_mask": mask}


def plain_words(batch: int) -> dict[str, Any]:
    """Sentences for models that take no mask."""
    return {"input_ids": torch.randint(2, WORDS, (batch, LENGTH))}


def pairs(batch: int) -> dict[str, Any]:
    """A sentence and the beginning of another."""
    return plain_words(batch) | {"decoder_input_ids": torch.randint(2, WORDS, (batch, 7))}


def pictures(batch: int) -> dict[str, Any]:
    """Square pictures."""
    return {"pixel_values": torch.randn(batch, 3, PIXELS, PIXELS)}


def captions(batch: int) -> dict[str, Any]:
    """Pictures, each with a sentence."""
    return words(batch) | pictures(batch)


def sounds(batch: int) -> dict[str, Any]:
    """A quarter of a second."""
    return {"input_values": torch.randn(batch, 4000)}
