"""Tiny random checkpoints of every architecture, made by transformers' own classes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [1.5 + i for i in range(8)],
}

GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
OLMO3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {**YARN, "rope_theta": 5e5},
}
# Queries grow by ln(2), ln(3)... at each 16th position.
MINISTRAL3_ROPE = {
    **YARN,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}


GEMMA4 = {
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 448,
    "final_logit_softcapping": 30.0,
}
GEMMA4_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
QWEN35 = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
}
GRANITE4 = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 8.0,
    "shared_intermediate_size": 112,
    "mamba_n_heads": 4,
}
FALCON_H1 = {
    "mamba_d_ssm": 128,
    "mamba_expand": 3,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.35, 0.5, 0.7, 1.5, 0.6],
    "mlp_multipliers": [0.8, 0.4],
}


def _phi(**more: Any) -> dict[str, Any]:
    return {"original_max_position_embeddings": 32, "sliding_window": 24, **more}


# Name: transformers' class and what its configuration has beside COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 1e4}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"tie_word_embeddings": True, "head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 3,
            "num_hidden_layers": 7,
            "layer_types": [*GEMMA4_TYPES, *GEMMA4_TYPES, "full_attention"],
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-12b": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": [*GEMMA4_TYPES, "full_attention"],
        },
    ),
    "phi3": ("Phi3", _phi()),
    "phi3-longrope": ("Phi3", _phi(rope_parameters=LONG)),
    "phi4-mini": (
        "Phi3",
        _phi(
            rope_parameters={
                **LONG,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            }
        ),
    ),
    "ministral3": ("Ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL3_ROPE}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 5, "sliding_window": 24, "rope_parameters": OLMO3_ROPES},
    ),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 5, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "exaone4-small": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3},
    ),
    "glm4": ("Glm4", {"head_dim": 32}),
    "glm4-0414": ("Glm4", {"head_dim": 32, "attention_bias": False}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 8.0,
        },
    ),
    "granite-4": (
        "GraniteMoeHybrid",
        {
            **GRANITE4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
        },
    ),
    "granite-4-h": (
        "GraniteMoeHybrid",
        {
            **GRANITE4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_d_state": 32,
            "tie_word_embeddings": True,
        },
    ),
    "granite-4-h-moe": (
        "GraniteMoeHybrid",
        {
            **GRANITE4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
        },
    ),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-norm": (
        "FalconH1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_d_state": 16},
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "linear_attention", "mlp"),
            ],
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True, **MOE},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**MOE, "num_key_value_heads": 4, "intermediate_size": 32}),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "full_attention", "conv"],
            "block_multiple_of": 32,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **MOE,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
            "num_dense_layers": 2,
            "tie_word_embeddings": True,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen35": (
        "Qwen3_5",
        {
            **QWEN35,
            "num_hidden_layers": 5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen35-small": (
        "Qwen3_5",
        {
            **QWEN35,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen35-moe": (
        "Qwen3_5Moe",
        {
            **QWEN35,
            **MOE,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
        },
    ),
}


def make_model(name: str, **further: Any) -> Any:
    """The model in float32 with every parameter random, norms, biases and sinks included."""
    class_name, more = FAMILIES[name]
    text = "Text" if class_name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{class_name}{text}Config")(**COMMON | more | further)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).float().eval()
    randomize(model)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Every parameter, norms, biases and sinks included."""
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.fill_(0.5 + torch.rand(()))
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
                if "Gemma4" in type(model).__name__ and key.endswith("q_norm.weight"):
                    # Trained weights hold the scale of scores, which is 1.
                    parameter *= len(parameter) ** -0.5
            elif "embed" not in key:
                # A trained router is sure of its choice: near ties, rounding would choose for it.
                sure = 8 if key.endswith((".gate.weight", "router.weight")) else 1
                parameter.copy_(sure * torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("expert_bias"):
                buffer += 0.2 * torch.randn_like(buffer)


def logits_of(model: Any, tokens: list[int]) -> Any:
    """Float32 [tokens, vocab_size]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()
