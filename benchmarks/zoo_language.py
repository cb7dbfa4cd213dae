"""Small language models of the transformers library: real classes, few and narrow layers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_made import TEXT, WORDS, Made, pairs, plain_words, words

SHORT = TEXT | {"max_position_embeddings": 64}
DECODER = SHORT | {"use_cache": False}
GROUPED = DECODER | {"num_key_value_heads": 2}
"""Two query heads for each key and value head."""

PAIR = {"vocab_size": WORDS, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 160,
        "decoder_ffn_dim": 160, "use_cache": False}  # fmt: skip
"""An encoder and a decoder."""

GPT = {"vocab_size": WORDS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False}


def _spectrograms(batch: int) -> dict[str, Any]:
    return {
        "input_features": torch.randn(batch, 16, 80),
        "decoder_input_ids": torch.randint(2, WORDS, (batch, 7)),
    }


ENCODERS: dict[str, Made] = {
    "albert": Made("AlbertModel", "AlbertConfig", TEXT | {"embedding_size": 32}, words),
    "bert": Made("BertModel", "BertConfig", TEXT, words),
    "deberta": Made(
        "DebertaModel",
        "DebertaConfig",
        SHORT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        words,
    ),
    "deberta_v2": Made(
        "DebertaV2Model",
        "DebertaV2Config",
        SHORT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        words,
    ),
    "distilbert": Made(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 160},
        words,
    ),
    "electra": Made("ElectraModel", "ElectraConfig", TEXT | {"embedding_size": 32}, words),
    "esm": Made(
        "EsmModel",
        "EsmConfig",
        SHORT | {"pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"},
        words,
    ),
    "fnet": Made("FNetModel", "FNetConfig", SHORT, plain_words),
    "funnel": Made(
        "FunnelModel",
        "FunnelConfig",
        {"vocab_size": WORDS, "d_model": 64, "block_sizes": [1, 1], "n_head": 4, "d_head": 16, "d_inner": 160,
         "num_decoder_layers": 1},
        words,
    ),
    "longformer": Made("LongformerModel", "LongformerConfig", SHORT | {"attention_window": [8, 8, 8]}, words),
    "modernbert": Made(
        "ModernBertModel",
        "ModernBertConfig",
        SHORT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                 "sep_token_id": 2},
        words,
    ),
    "mpnet": Made("MPNetModel", "MPNetConfig", SHORT, words),
    "roberta": Made("RobertaModel", "RobertaConfig", TEXT | {"pad_token_id": 1}, words),
    "squeezebert": Made(
        "SqueezeBertModel",
        "SqueezeBertConfig",
        SHORT | {"embedding_size": 64, "q_groups": 2, "k_groups": 2, "v_groups": 2, "intermediate_groups": 2,
                 "output_groups": 2},
        words,
    ),
    "xlnet": Made(
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": WORDS, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 160},
        words,
    ),
}  # fmt: skip

DECODERS: dict[str, Made] = {
    "bloom": Made(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 3, "n_head": 4, "use_cache": False},
        words,
    ),
    "cohere": Made("CohereForCausalLM", "CohereConfig", GROUPED, words),
    "falcon": Made("FalconForCausalLM", "FalconConfig", DECODER, words),
    "gemma": Made("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 16}, words),
    "gemma3": Made("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 16}, words),
    "gpt2": Made("GPT2LMHeadModel", "GPT2Config", GPT, words),
    "gpt_neo": Made(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": WORDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "use_cache": False},
        words,
    ),
    "gpt_neox": Made("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER, words),
    "gptj": Made("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 8}, words),
    "llama": Made("LlamaForCausalLM", "LlamaConfig", GROUPED, words),
    "mamba": Made(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8, "use_cache": False},
        plain_words,
    ),
    "mistral": Made("MistralForCausalLM", "MistralConfig", GROUPED, words),
    "mixtral": Made("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}, words),
    "olmo2": Made("Olmo2ForCausalLM", "Olmo2Config", GROUPED, words),
    "opt": Made(
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "ffn_dim": 160, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "use_cache": False},
        words,
    ),
    "phi": Made("PhiForCausalLM", "PhiConfig", GROUPED, words),
    "phi3": Made("Phi3ForCausalLM", "Phi3Config", GROUPED | {"pad_token_id": 0}, words),
    "qwen2": Made("Qwen2ForCausalLM", "Qwen2Config", GROUPED, words),
    "qwen3": Made("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 16}, words),
    "qwen3_moe": Made(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        GROUPED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        words,
    ),
    "starcoder2": Made("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED, words),
}  # fmt: skip

PAIRS: dict[str, Made] = {
    "bart": Made("BartModel", "BartConfig", PAIR | {"max_position_embeddings": 64}, pairs),
    "t5": Made(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4,
         "use_cache": False},
        pairs,
    ),
    "whisper": Made(
        "WhisperModel",
        "WhisperConfig",
        PAIR | {"max_source_positions": 40, "max_target_positions": 40, "num_mel_bins": 16, "pad_token_id": 0,
                "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        _spectrograms,
    ),
}  # fmt: skip

MODELS = ENCODERS | DECODERS | PAIRS
