"""The only list of the tensors of a blueprint's model, with GGUF names and shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from twinphase.blueprint import Blueprint, Mamba2, Multipliers, ShortConv
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.multiplied import multiplied_tensors

Shape = tuple[int, ...]
# It has a row per token, with numbers for each layer; a step reads only the rows of its tokens.
LAYER_EMBEDDING = "per_layer_token_embd.weight"
LAYER_PROJECTION = "per_layer_model_proj.weight"
# Names of the matrices, by whether the checkpoint stores them as one.
QKV = {False: ("attn_q", "attn_k", "attn_v"), True: ("attn_qkv",)}
GATE_UP = {False: ("ffn_gate", "ffn_up"), True: ("ffn_up",)}
SHARED_GATE_UP = {False: ("ffn_gate_shexp", "ffn_up_shexp"), True: ("ffn_up_shexp",)}
EXPERTS_GATE_UP = {False: ("ffn_gate_exps", "ffn_up_exps"), True: ("ffn_gate_up_exps",)}
# The blueprint's RoPE frequencies were computed from these tensors.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def layer_tensors(blueprint: Blueprint, layer: int) -> dict[str, Shape]:
    """The row-major shape of each tensor in a layer, by its name after `blk.N.`."""
    b = blueprint
    shapes = _attention_tensors(b, layer) if b.attends(layer) else {}
    if layer in b.recurrent_layers:
        shapes |= _recurrent_tensors(b)
    if b.norm_before and b.mixes(layer):
        shapes["attn_norm.weight"] = (b.hidden_size,)
    if b.norm_before and b.has_ffn(layer):
        shapes[f"{b.ffn_norm}.weight"] = (b.hidden_size,)
    if b.norm_after:
        shapes["post_attention_norm.weight"] = shapes["post_ffw_norm.weight"] = (b.hidden_size,)
    if b.layer_embedding_size:
        shapes["inp_gate.weight"] = (b.layer_embedding_size, b.hidden_size)
        shapes["proj.weight"] = (b.hidden_size, b.layer_embedding_size)
        shapes["post_norm.weight"] = (b.hidden_size,)
    if b.layer_scales:
        shapes["layer_output_scale.weight"] = (1,)
    if b.has_ffn(layer):
        shapes |= _expert_tensors(b) if b.experts_of(layer) else _dense_tensors(b, layer)
    return shapes


def _recurrent_tensors(b: Blueprint) -> dict[str, Shape]:
    r = b.recurrence
    assert r is not None
    if isinstance(r, ShortConv):
        return {
            "shortconv.in_proj.weight": (3 * r.channels, b.hidden_size),
            "shortconv.conv.weight": (r.channels, r.taps),
            "shortconv.out_proj.weight": (b.hidden_size, r.channels),
        }
    heads = r.value_heads
    shapes: dict[str, Shape] = {
        "ssm_conv1d.weight": (r.channels, r.taps),
        "ssm_dt.bias": (heads,),
        "ssm_out.weight": (b.hidden_size, r.num_values),
    }
    if isinstance(r, Mamba2):
        by_head: Shape = (heads,) if r.log_decay else (heads, 1)
        groups = r.key_heads, r.num_values // r.key_heads
        if r.norm != "none":
            shapes["ssm_norm.weight"] = (r.num_values,) if r.log_decay else groups
        return shapes | {
            "ssm_in.weight": (r.num_values + r.channels + heads, b.hidden_size),
            "ssm_conv1d.bias": (r.channels,),
            "ssm_a": by_head,
            "ssm_d": by_head,
        }
    return shapes | {
        "attn_qkv.weight": (r.channels, b.hidden_size),
        "attn_gate.weight": (r.num_values, b.hidden_size),
        "ssm_alpha.weight": (heads, b.hidden_size),
        "ssm_beta.weight": (heads, b.hidden_size),
        "ssm_a": (heads,),
        "ssm_norm.weight": (r.value_dim,),
    }


def taken_apart(checkpoint: Checkpoint, blueprint: Blueprint) -> Checkpoint:
    """A checkpoint with Mamba-2's input matrices under the names of a delta rule's.

    The file's single matrix has rows for the gate, for the convolution's input, and for the steps.
    Its vectors may have a second dimension. No data is copied.
    """
    r = blueprint.recurrence
    if not isinstance(r, Mamba2):
        return checkpoint
    tensors = dict(checkpoint.tensors)
    rows = {"attn_gate": r.num_values, "attn_qkv": r.channels, "ssm_alpha": r.value_heads}
    for layer in blueprint.recurrent_layers:
        prefix = f"blk.{layer}."
        for name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
            if info := tensors.get(prefix + name):
                tensors[prefix + name] = replace(info, shape=(math.prod(info.shape),))
        whole = tensors.pop(f"{prefix}ssm_in.weight", None)
        if whole is None:
            continue
        row_bytes = whole.nbytes // whole.shape[0]
        offset = whole.offset
        for part, count in rows.items():
            name = f"{prefix}{part}.weight"
            nbytes = count * row_bytes
            shape = (count, whole.shape[1])
            tensors[name] = replace(whole, name=name, shape=shape, offset=offset, nbytes=nbytes)
            offset += nbytes
    return replace(checkpoint, tensors=tensors)


def multiplied(checkpoint: Checkpoint, blueprint: Blueprint) -> Checkpoint:
    """A checkpoint from `taken_apart`, with muP's multipliers for small tensors."""
    m = blueprint.multipliers
    if m == Multipliers():
        return checkpoint
    r = blueprint.recurrence
    hidden = blueprint.hidden_size
    factors = {"attn_norm": [(hidden, m.attn_norm)], blueprint.ffn_norm: [(hidden, m.ffn_norm)]}
    if isinstance(r, Mamba2):
        keys = [(r.num_keys, factor) for factor in (m.keys, m.queries)]
        factors["ssm_conv1d"] = [(r.num_values, m.values), *keys]
        factors["ssm_alpha"] = [(r.value_heads, m.steps)]
    return multiplied_tensors(
        checkpoint,
        {
            f"blk.{layer}.{name}.weight": factor
            for layer in range(blueprint.num_layers)
            for name, factor in factors.items()
        },
    )


def gate_up(b: Blueprint) -> tuple[str, ...]:
    """The input matrices of a feed-forward layer."""
    return GATE_UP[b.fused_gate_up] if b.ffn_gate else ("ffn_up",)


def attention_projections(b: Blueprint, layer: int) -> tuple[str, ...]:
    """The input matrices of a layer's attention: queries, keys and values."""
    if b.kv_source(layer) != layer:
        return QKV[False][:1]
    return QKV[b.fused_qkv] if b.has_values(layer) else QKV[False][:2]


def _attention_tensors(b: Blueprint, layer: int) -> dict[str, Shape]:
    hidden = b.hidden_size
    kv = b.kv_shape(layer)
    dim = kv.head_dim
    queries = b.num_heads * dim
    keys = kv.num_heads * dim
    widths = {
        "attn_q": queries * (1 + b.attention_gate),
        "attn_k": keys,
        "attn_v": keys,
        "attn_qkv": queries + 2 * keys,
    }
    shapes: dict[str, Shape] = {}
    for name in attention_projections(b, layer):
        shapes[f"{name}.weight"] = (widths[name], hidden)
        if b.qkv_bias:
            shapes[f"{name}.bias"] = (widths[name],)
    if b.qk_norm != "none":
        by_head = b.qk_norm == "head"
        whole = b.whole  # Each rank has all weights of a norm.
        shapes["attn_q_norm.weight"] = (dim if by_head else whole.num_heads * dim,)
        if b.kv_source(layer) == layer:
            shapes["attn_k_norm.weight"] = (dim if by_head else whole.num_kv_heads * dim,)
    if b.sinks:
        shapes["attn_sinks.weight"] = (b.num_heads,)
    shapes["attn_output.weight"] = (hidden, queries)
    if b.output_bias:
        shapes["attn_output.bias"] = (hidden,)
    return shapes


def _dense_tensors(b: Blueprint, layer: int) -> dict[str, Shape]:
    width = b.ffn_width(layer)
    up = (2 * width if b.fused_gate_up else width, b.hidden_size)
    shapes: dict[str, Shape] = {f"{name}.weight": up for name in gate_up(b)}
    return shapes | {"ffn_down.weight": (b.hidden_size, width)}


def _expert_tensors(b: Blueprint) -> dict[str, Shape]:
    e = b.experts
    assert e is not None
    up = (e.count, e.ffn_size * (1 + e.fused_gate_up), b.hidden_size)
    shapes: dict[str, Shape] = {
        "ffn_gate_inp": (e.count, b.hidden_size),
        "ffn_down_exps": (e.count, b.hidden_size, e.ffn_size),
        **dict.fromkeys(EXPERTS_GATE_UP[e.fused_gate_up], up),
    }
    tensors: dict[str, Shape] = {f"{name}.weight": shape for name, shape in shapes.items()}
    if e.bias:
        tensors |= {f"{name}.bias": shape[:-1] for name, shape in shapes.items()}
    if e.choice_bias:
        tensors["exp_probs_b.bias"] = (e.count,)
    if e.shared_size:
        own = (e.shared_size * (1 + e.fused_shared), b.hidden_size)
        tensors |= {f"{name}.weight": own for name in SHARED_GATE_UP[e.fused_shared]}
        tensors["ffn_down_shexp.weight"] = (b.hidden_size, e.shared_size)
    if e.shared_gate and e.shared_size:
        tensors["ffn_gate_inp_shexp.weight"] = (1, b.hidden_size)
    return tensors


def model_tensors(blueprint: Blueprint) -> Iterator[tuple[str, Shape]]:
    """(name, row-major shape) of every tensor that the model must have."""
    yield "token_embd.weight", (blueprint.vocab_size, blueprint.hidden_size)
    if blueprint.layer_embedding_size:
        width = blueprint.num_layers * blueprint.layer_embedding_size
        yield LAYER_EMBEDDING, (blueprint.vocab_size, width)
        yield LAYER_PROJECTION, (width, blueprint.hidden_size)
        yield "per_layer_proj_norm.weight", (blueprint.layer_embedding_size,)
    for i in range(blueprint.num_layers):
        for name, shape in layer_tensors(blueprint, i).items():
            yield f"blk.{i}.{name}", shape
    yield f"{blueprint.output_norm}.weight", (blueprint.hidden_size,)
    if not blueprint.tied:
        yield "output.weight", (blueprint.vocab_size, blueprint.hidden_size)


def unused_tensors(blueprint: Blueprint) -> Iterator[str]:
    """Tensors that files contain but the model does not use."""
    yield from ROPE_TENSORS
    for i in range(blueprint.num_layers - blueprint.shared_kv_layers, blueprint.num_layers):
        yield from (f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm"))


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], optional: Collection[str] = ()
) -> None:
    """Check names and row-major shapes before anything is allocated.

    Raises:
        CheckpointError: a tensor is missing or has another shape; the message names the first one.
        UnsupportedModelError: a tensor would be ignored; the message names it.
    """
    for name in checkpoint.tensors:
        if name not in expected and name not in optional:
            raise UnsupportedModelError(
                f"{checkpoint.path.name} has a tensor {name}, which {checkpoint.architecture} "
                "does not use here.",
                "Use a model without it: ignoring it would change the answers.",
            )
    for name, shape in expected.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{checkpoint.path.name} has no tensor {name}.", FIX)
        # GGUF's converter sometimes drops a first dimension of 1.
        if info.shape not in (shape, shape[1:] if shape[:1] == (1,) else shape):
            raise CheckpointError(f"Tensor {name} has shape {info.shape}, expected {shape}.", FIX)
