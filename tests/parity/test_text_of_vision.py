"""A vision-language folder answers text with its text model, as transformers does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny_families import COMMON, GEMMA4, MINISTRAL3_ROPE

from steps import Steps
from twinphase.backends.reference import ReferenceBackend

TOKENS = np.random.default_rng(0).integers(3, 448, 40, dtype=np.int32)
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

VISION4 = {"patch_size": 4, "mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8}


def mistral3():
    text = transformers.Ministral3Config(
        **COMMON, head_dim=32, rope_parameters=dict(MINISTRAL3_ROPE)
    )
    vision = transformers.PixtralVisionConfig(**VISION, head_dim=16)
    config = transformers.Mistral3Config(vision_config=vision, text_config=text)
    return transformers.Mistral3ForConditionalGeneration(config)


def gemma3():
    more = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
    text = transformers.Gemma3TextConfig(**COMMON | more, sliding_window=24)
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4():
    text = transformers.Gemma4UnifiedTextConfig(
        **COMMON | GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    return transformers.Gemma4UnifiedForConditionalGeneration(
        transformers.Gemma4UnifiedConfig(text_config=text, vision_config=VISION4)
    )


@pytest.mark.parametrize("make", (mistral3, gemma3, gemma4))
def test_text_is_answered(tmp_path, make):
    torch.manual_seed(0)
    model = make().float().eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS[None].astype(np.int64))).logits[0].numpy()
    found = Steps(tmp_path, ReferenceBackend(), num_blocks=32).chunked(TOKENS, [40])
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() <= 1e-3
