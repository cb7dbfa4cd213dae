"""Small models of the transformers library: real classes, few and narrow layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WORDS = 500
TEXT = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 160}  # fmt: skip
VISION = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160,
          "image_size": 64, "patch_size": 16}  # fmt: skip
LLAMA = TEXT | {"num_key_value_heads": 2, "use_cache": False, "max_position_embeddings": 64}


@dataclass(frozen=True)
class Made:
    """A model class, the options of its configuration, and its inputs."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]

    def build(self) -> nn.Module:
        """Build the model with random weights."""
        library = importlib.import_module("transformers")
        return getattr(library, self.model)(getattr(library, self.config)(**self.options))


def _words(batch: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(2, WORDS, (batch, 12)),
        "attention_mask": torch.ones(batch, 12, dtype=torch.int64),
    }


def _pairs(batch: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(2, WORDS, (batch, 12)),
        "decoder_input_ids": torch.randint(2, WORDS, (batch, 7)),
    }


def _pictures(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 64, 64)}


def _sounds(batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, 4000)}


MODELS: dict[str, Made] = {
    "bert": Made("BertModel", "BertConfig", TEXT, _words),
    "roberta": Made("RobertaModel", "RobertaConfig", TEXT | {"pad_token_id": 1}, _words),
    "distilbert": Made(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 160},
        _words,
    ),
    "gpt2": Made(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False},
        _words,
    ),
    "opt": Made(
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "ffn_dim": 160, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "use_cache": False},
        _words,
    ),
    "llama": Made("LlamaForCausalLM", "LlamaConfig", LLAMA, _words),
    "qwen2": Made("Qwen2ForCausalLM", "Qwen2Config", LLAMA, _words),
    "qwen3": Made("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 16}, _words),
    "t5": Made(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4,
         "use_cache": False},
        _pairs,
    ),
    "wav2vec2": Made(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        TEXT | {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4),
                "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
                "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False},
        _sounds,
    ),
    "vit": Made("ViTForImageClassification", "ViTConfig", VISION, _pictures),
    "swin": Made(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4),
         "window_size": 4},
        _pictures,
    ),
    "convnextv2": Made(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"hidden_sizes": (32, 48, 64, 96), "depths": (1, 1, 2, 1), "image_size": 64},
        _pictures,
    ),
    "resnet": Made(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 32, "hidden_sizes": (64, 96, 128, 160), "depths": (1, 2, 1, 1)},
        _pictures,
    ),
    "mobilenetv2": Made(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": 64}, _pictures
    ),
}  # fmt: skip
