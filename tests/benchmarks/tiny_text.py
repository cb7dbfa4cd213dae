"""Tiny sentences in the format of SST-2, and a tiny encoder in the files of a pretrained one."""

from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertModel

GOOD, BAD = ["fine", "warm", "bright"], ["dull", "cold", "flat"]


def write_sst2(folder: Path, train: int, rest: int) -> None:
    """Sentences of a few words; good ones have two good words, bad ones two bad ones."""
    numbers = np.random.default_rng(0)
    for name, count in (("train", train), ("dev", rest), ("test", rest)):
        lines: list[str] = []
        for label in numbers.integers(0, 2, count).tolist():
            words = [*numbers.choice(GOOD if label else BAD, 2), *["film"] * int(numbers.integers(0, 4))]
            lines.append(f"a {' '.join(numbers.permutation(words).tolist())}\t{label}\n")
        (folder / f"sst2_{name}.tsv").write_text("".join(lines))


def write_minilm(folder: Path) -> BertConfig:
    """An encoder of one layer in the files of a pretrained one."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", *GOOD, *BAD]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    return config
