"""Small models of the transformers library that see or hear: real classes, few and narrow layers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_made import PIXELS, TEXT, VISION, WORDS, Made, captions, pictures, sounds

PLAIN = {name: value for name, value in VISION.items() if name != "intermediate_size"}
BOTH = TEXT | VISION
SHORT = TEXT | {"max_position_embeddings": 64}
PATCHES = (PIXELS // VISION["patch_size"]) ** 2
LISTENING = TEXT | {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4),
                    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
                    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}  # fmt: skip


def _series(batch: int) -> dict[str, Any]:
    return {"past_values": torch.randn(batch, 32, 2)}


def _vectors(batch: int) -> dict[str, Any]:
    return {"inputs": torch.randn(batch, 10, 32)}


def _seen_words(batch: int) -> dict[str, Any]:
    """Sentences that begin with a place for each patch of their picture."""
    image = torch.full((batch, PATCHES), WORDS - 1)
    return {"input_ids": torch.cat((image, torch.randint(2, WORDS - 1, (batch, 5))), 1)} | pictures(batch)


PICTURES: dict[str, Made] = {
    "beit": Made("BeitModel", "BeitConfig", VISION | {"use_relative_position_bias": True}, pictures),
    "convnext": Made(
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": (32, 48, 64, 96), "depths": (1, 1, 2, 1)},
        pictures,
    ),
    "convnextv2": Made(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        {"hidden_sizes": (32, 48, 64, 96), "depths": (1, 1, 2, 1), "image_size": PIXELS},
        pictures,
    ),
    "deit": Made("DeiTModel", "DeiTConfig", VISION, pictures),
    "detr": Made(
        "DetrModel",
        "DetrConfig",
        {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
         "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 32, 48, 64],
                             "depths": [1, 1, 1, 1], "out_features": ["stage4"]},
         "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "num_queries": 5},
        pictures,
    ),
    "dinov2": Made("Dinov2Model", "Dinov2Config", PLAIN, pictures),
    "efficientnet": Made(
        "EfficientNetModel",
        "EfficientNetConfig",
        {"image_size": PIXELS, "width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
        pictures,
    ),
    "mobilenetv2": Made(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": PIXELS}, pictures
    ),
    "mobilevit": Made(
        "MobileViTModel",
        "MobileViTConfig",
        {"image_size": PIXELS, "hidden_sizes": [32, 48, 64],
         "neck_hidden_sizes": [16, 16, 32, 32, 48, 48, 64]},
        pictures,
    ),
    "poolformer": Made(
        "PoolFormerModel",
        "PoolFormerConfig",
        {"hidden_sizes": [32, 32, 48, 64], "depths": [1, 1, 2, 1]},
        pictures,
    ),
    "regnet": Made(
        "RegNetModel",
        "RegNetConfig",
        {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 2, 1], "groups_width": 8},
        pictures,
    ),
    "resnet": Made(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 32, "hidden_sizes": (64, 96, 128, 160), "depths": (1, 2, 1, 1)},
        pictures,
    ),
    "segformer": Made(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
         "decoder_hidden_size": 32},
        pictures,
    ),
    "swin": Made(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": PIXELS, "patch_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4),
         "window_size": 4},
        pictures,
    ),
    "vit": Made("ViTForImageClassification", "ViTConfig", VISION, pictures),
    "vit_msn": Made("ViTMSNModel", "ViTMSNConfig", VISION, pictures),
}  # fmt: skip

CAPTIONS: dict[str, Made] = {
    "blip": Made(
        "BlipModel",
        "BlipConfig",
        {"text_config": SHORT | {"encoder_hidden_size": 64, "projection_dim": 32},
         "vision_config": VISION | {"projection_dim": 32}, "projection_dim": 32},
        captions,
    ),
    "clip": Made(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": SHORT | {"projection_dim": 32}, "vision_config": VISION | {"projection_dim": 32},
         "projection_dim": 32},
        captions,
    ),
    "llava": Made(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"vision_config": VISION | {"model_type": "clip_vision_model"},
         "text_config": SHORT | {"model_type": "llama", "num_key_value_heads": 2, "use_cache": False},
         "image_token_index": WORDS - 1, "vision_feature_layer": -1},
        _seen_words,
    ),
    "siglip": Made(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": TEXT | {"max_position_embeddings": 12}, "vision_config": VISION},
        captions,
    ),
    "vilt": Made("ViltModel", "ViltConfig", BOTH | {"max_position_embeddings": 64}, captions),
}  # fmt: skip

OTHERS: dict[str, Made] = {
    "hubert": Made("HubertModel", "HubertConfig", LISTENING, sounds),
    "patchtst": Made(
        "PatchTSTModel",
        "PatchTSTConfig",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 64,
         "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 160},
        _series,
    ),
    "perceiver": Made(
        "PerceiverModel",
        "PerceiverConfig",
        {"num_latents": 8, "d_latents": 64, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2,
         "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        _vectors,
    ),
    "wav2vec2": Made("Wav2Vec2Model", "Wav2Vec2Config", LISTENING, sounds),
}  # fmt: skip

MODELS = PICTURES | CAPTIONS | OTHERS
