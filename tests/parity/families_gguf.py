"""Writes a checkpoint of tiny_families.py as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from twinphase.weights.checkpoint import Checkpoint

RECURRENT = ("lfm2", "lfm2moe", "qwen35", "qwen35moe", "granitehybrid")
PERMUTED = ("llama", "granite", "granitehybrid", "smollm3", "mistral3")


def write_gguf(
    checkpoint: Checkpoint,
    model: Any,
    path: Path,
    add_more: Callable[[gguf.GGUFWriter], None] = lambda writer: writer.add_tokenizer_model(
        "no_vocab"  # llama.cpp loads such files too
    ),
) -> Path:
    """`checkpoint` is the folder of transformers' `model`; its tensors have GGUF's names.

    `add_more` writes the vocabulary, and what only this model has.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # those of layers with a window
    arch = checkpoint.architecture
    spaces = arch == "granitehybrid" and "linear_attention" in config.layer_types
    falcon = arch == "falcon-h1"
    nemotron = arch == "nemotron_h"
    if arch == "granitehybrid" and not spaces:  # The converter calls it so.
        arch = "granite"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    drafting = _drafting_layers(checkpoint)
    writer.add_block_count(config.num_hidden_layers + drafting)
    writer.add_head_count(config.num_attention_heads)
    kinds = getattr(config, "layer_types", None) or []
    heads = config.num_key_value_heads
    by_layer = config.model_type == "granitemoehybrid"
    without_kv = [kind != "full_attention" for kind in kinds]
    if drafting:  # Such files name attention by its interval, and count the layer for drafts.
        writer.add_head_count_kv(heads)
        writer.add_full_attention_interval(4)
        writer.add_nextn_predict_layers(drafting)
        name = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
        if name not in checkpoint.tensors:
            values = np.zeros((config.hidden_size, 2 * config.hidden_size), np.float32)
            writer.add_tensor(name, values)
    elif arch in RECURRENT or by_layer or nemotron:
        writer.add_head_count_kv([0 if without else heads for without in without_kv])
    elif arch != "gemma4":
        writer.add_head_count_kv(heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "gemma4":
        _add_gemma4(writer, config)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    add_more(writer)
    if nemotron:  # llama.cpp wants the key of LayerNorm.
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        eps = config.norm_eps if arch.startswith("lfm2") else config.rms_norm_eps
        writer.add_layer_norm_rms_eps(eps)
    if arch.startswith("qwen35"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if nemotron:
        _add_nemotron(writer, config)
    if spaces or falcon:
        _add_state_spaces(writer, config)
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    _add_feed_forward(writer, config, arch)
    _add_rope(writer, config, arch, head_dim)
    _add_scales(writer, config, arch)
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        if arch == "gemma-embedding":  # The class halves what config.json says.
            window = 2 * (window - 1)
        writer.add_sliding_window(window)
        if arch in ("exaone4", "olmo2", "gemma4"):
            writer.add_sliding_window_pattern(
                [kind == "sliding_attention" for kind in config.layer_types]
            )
    fused = {}
    for name, info in checkpoint.tensors.items():
        values = checkpoint.raw(name).view(np.float32).reshape(info.shape)
        if arch == "qwen35moe" and name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
            fused[name] = values  # As the converter's --fuse-gate-up-exps has them.
            continue
        if arch in PERMUTED and name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _permuted(values, head_dim)
        if arch.startswith("qwen35"):
            values = _tiled_heads(name, values, config)
            if name.endswith(".ssm_a"):
                values = -np.exp(values)
            if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
                values = values + 1
        if arch in ("gemma", "gemma2", "gemma3", "gemma-embedding") and name.endswith(
            "norm.weight"
        ):
            values = values + 1
        if falcon:
            values = _folded(name, values, config)
        if name.endswith((".ssm_a", ".ssm_d")) and (spaces or falcon or nemotron):
            values = -np.exp(values) if name.endswith("a") else values
            values = values.reshape(-1, 1)
        if name.endswith("ssm_norm.weight") and (spaces or falcon or nemotron):
            groups = config.n_groups if nemotron else config.mamba_n_groups
            values = values.reshape(groups, -1)
        if falcon and name.endswith(".ffn_norm.weight"):  # As gguf's map of its names has it.
            name = name.removesuffix(".weight")
        parts = {name: values}
        if name.endswith("ffn_gate_inp_shexp.weight"):  # Some converters have dropped the 1.
            parts = {name: values[0]}
        if by_layer and name.endswith(("ffn_up.weight", "ffn_up_shexp.weight")):
            parts = dict(zip((name.replace("up", "gate"), name), np.split(values, 2), strict=True))
        for part, own in parts.items():
            writer.add_tensor(part, np.ascontiguousarray(own))
    for name in fused:
        if name.endswith("ffn_gate_exps.weight"):
            both = [fused[name], fused[name.replace("gate", "up")]]
            writer.add_tensor(name.replace("gate", "gate_up"), np.concatenate(both, axis=1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """conversion/gemma.py: lists by layer, and full layers' RoPE by divisors."""
    layers = range(config.num_hidden_layers)
    own = [config.per_layer_config[i] for i in layers]
    full = own[-1].head_dim
    writer.add_head_count_kv([one.num_key_value_heads for one in own])
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turned = full // 8
    divisors = [1.0] * turned + [1e30] * (full // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_state_spaces(writer: gguf.GGUFWriter, config: Any) -> None:
    """conversion/granite.py, in whose models nothing is rotated; conversion/falcon_h1.py."""
    falcon = config.model_type == "falcon_h1"
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(
        config.mamba_d_ssm if falcon else config.mamba_expand * config.hidden_size
    )
    if falcon:
        return
    writer.add_rope_scaling_finetuned(False)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _add_nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    """conversion/nemotron.py: which layer is what follows from these lists and the KV heads."""
    mlp = [config.intermediate_size if kind == "mlp" else 0 for kind in config.layer_types]
    writer.add_feed_forward_length(mlp)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_rope_scaling_finetuned(False)


def _folded(name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """conversion/falcon_h1.py: multipliers are part of the weights."""
    into = config.attention_in_multiplier
    gate, down = config.mlp_multipliers
    keys = config.mamba_n_groups * config.mamba_d_state
    widths = (config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads)
    factors: dict[str, Any] = {
        "token_embd": config.embedding_multiplier,
        "output": config.lm_head_multiplier,
        "attn_q": into,
        "attn_k": into * config.key_multiplier,
        "attn_v": into,
        "attn_output": config.attention_out_multiplier,
        "ssm_in": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, widths)[:, None],
        "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": gate,
        "ffn_down": down,
    }
    factor = factors.get(name.removesuffix(".weight").rpartition(".")[2], 1)
    return (values * factor).astype(np.float32)


def _drafting_layers(checkpoint: Checkpoint) -> int:
    """One with the usual pattern of layers, none with another: files of both kinds are read."""
    config = checkpoint.config or {}
    usual = (config.get("layer_types") or [])[:4] == 3 * ["linear_attention"] + ["full_attention"]
    return int(checkpoint.architecture.startswith("qwen35") and usual)


def _tiled_heads(name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """conversion/qwen.py's order of value heads: those of one key head are no longer neighbours."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    keys = config.linear_num_key_heads
    count = config.linear_num_value_heads // keys
    size = config.linear_value_head_dim
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        size = 1
    elif part == "ssm_out":
        return _tiled(values.T, keys, count, size).T
    elif part in ("attn_qkv", "ssm_conv1d") and "linear" in config.layer_types[_layer(name)]:
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([values[:first], _tiled(values[first:], keys, count, size)])
    elif part != "attn_gate":
        return values
    return _tiled(values, keys, count, size)


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _tiled(values: NDArray[np.float32], keys: int, count: int, size: int) -> NDArray[np.float32]:
    rows = values.reshape(keys, count, size, -1)
    return rows.swapaxes(0, 1).reshape(values.shape)


def _permuted(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """convert_hf_to_gguf.py's `permute`: the two halves of each head in turn."""
    heads = len(values) // head_dim
    return values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)


def _add_feed_forward(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    if arch == "nemotron_h":
        return
    size = getattr(config, "intermediate_size", None)
    if arch == "granite":
        size = getattr(config, "shared_intermediate_size", size)
    if arch == "lfm2":  # convert_hf_to_gguf.py: the width that the model makes of it
        multiple = config.block_multiple_of
        size = -(-int(2 * size / 3) // multiple) * multiple
    if getattr(config, "use_double_wide_mlp", False):
        own = config.num_hidden_layers - config.num_kv_shared_layers
        writer.add_feed_forward_length([size] * own + [2 * size] * config.num_kv_shared_layers)
    elif size is not None:
        writer.add_feed_forward_length(size)
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if arch == "qwen35moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("qwen3moe", "gpt-oss", "lfm2moe", "qwen35moe"):
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        )


def _add_rope(writer: gguf.GGUFWriter, config: Any, arch: str, head_dim: int) -> None:
    if arch == "nemotron_h":  # nothing is rotated
        return
    rope = config.rope_parameters
    if arch == "olmo2":
        rope = rope.get("full_attention", rope)
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "gemma4":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_rope_dimension_count(config.per_layer_config["full_attention"].head_dim)
        writer.add_rope_dimension_count_swa(head_dim)
        return
    if arch in ("gemma3", "gemma-embedding"):
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dim)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        for which in ("long", "short"):
            writer.add_tensor(
                f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)
            )
    if kind == "llama3":  # convert_hf_to_gguf.py: the divisors, worked out
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        original = rope["original_max_position_embeddings"]
        divisors = []
        for i in range(dim // 2):
            wave = 2 * np.pi * rope["rope_theta"] ** (2 * i / dim)
            smooth = (original / wave - low) / (high - low)
            divisors.append(
                1 / ((1 - min(1, max(0, smooth))) / rope["factor"] + min(1, max(0, smooth)))
            )
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_scales(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch.startswith("granite"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
