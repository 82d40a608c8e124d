"""Which kernels a model needs, by their specs (`compiler.py`): nothing is compiled that it does not use."""

from __future__ import annotations

from twinphase.backends.cpu.formats import FORMATS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.program_layout import TILE_BITS
from twinphase.backends.cpu.tiling import GATE_PARTS, LOGIT_PARTS
from twinphase.backends.cpu.weights import check_types
from twinphase.blueprint import Blueprint, Rope
from twinphase.errors import UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint

KINDS = ("q8", "f32")  # what an elementwise kernel writes for a linear layer to read


def check_heads(blueprint: Blueprint) -> None:
    """Raises UnsupportedModelError for head sizes that the attention kernels do not cover."""
    head_dim = blueprint.head_dim
    heads = blueprint.whole.num_heads
    if head_dim % 16 or head_dim > 256 or heads * head_dim % 32:
        raise UnsupportedModelError(
            f"Head size {head_dim} is not supported by the cpu backend.",
            "It must be a multiple of 16 up to 256, and all heads together of 32.",
        )


def most_rows(blueprint: Blueprint) -> int:
    """Rows that a step may have, so that no kernel has more tiles than a claim word can count."""
    times = GATE_PARTS * (blueprint.experts.used if blueprint.experts else 1)
    if blueprint.logit_scale != 1 or blueprint.logit_softcap:
        times = max(times, LOGIT_PARTS)
    return ((1 << TILE_BITS) - 1) // times


def rope_spec(blueprint: Blueprint, rope: Rope | None, dtype: str) -> str:
    """Normalizing, rotating and writing; `dtype` is the KV cache's."""
    turned, interleaved = (rope.dim, int(rope.interleaved)) if rope else (0, 0)
    norm = (
        "none" if blueprint.qk_norm == "width" else blueprint.qk_norm
    )  # which is an operation of its own
    return f"rope_kv_write:{blueprint.head_dim}:{turned}:{interleaved}:{dtype}:{norm}"


def attention_spec(phase: str, blueprint: Blueprint, dtype: str) -> str:
    """Attention of a phase."""
    cap = blueprint.attention_softcap or 0
    return f"attention_{phase}:{blueprint.head_dim}:{blueprint.group}:{dtype}:{cap:g}:{int(blueprint.sinks)}"


def merge_spec(blueprint: Blueprint) -> str:
    """The merge of decode's partial results."""
    return f"attention_merge:{blueprint.head_dim}:{blueprint.group}:{int(blueprint.sinks)}"


def linear_spec(type_name: str) -> str:
    """A linear layer."""
    return f"{'quantized' if type_name in FORMATS else 'dense'}_linear:{type_name}"


def experts_spec(type_name: str) -> str:
    """A linear layer of every expert."""
    return f"{'quantized' if type_name in FORMATS else 'dense'}_experts:{type_name}"


def model_specs(checkpoint: Checkpoint, blueprint: Blueprint, dtype: str, isa: Isa) -> list[str]:
    """Specs of all kernels of a model.

    Raises:
        UnsupportedModelError: a tensor type without a kernel.
    """
    weights = [
        t for t in checkpoint.tensors.values() if t.name.endswith(".weight") and len(t.shape) >= 2
    ]
    embedding = checkpoint.tensors["token_embd.weight"]
    linear = {
        t.type for t in weights if len(t.shape) == 2 and (blueprint.tied or t is not embedding)
    }
    experts = {t.type for t in weights if len(t.shape) == 3}
    check_types(linear | experts | {embedding.type})
    specs = [
        *(attention_spec(phase, blueprint, dtype) for phase in ("prefill", "decode")),
        merge_spec(blueprint),
        *map(linear_spec, linear),
        *map(experts_spec, experts),
        *(f"pack:{name}" for name in (linear | experts) & set(FORMATS)),
        *(rope_spec(blueprint, rope, dtype) for rope in set(blueprint.ropes)),
        *(f"rms_norm:{kind}" for kind in KINDS),
        *(f"gate_mul:{blueprint.activation}:{kind}" for kind in KINDS),
        "quantize",
        *(["round_rows"] if any(map(isa.takes_bf16, linear)) else []),
        "pick_rows:f32",
        f"embed:{embedding.type}",
        "run_program",
    ]
    if blueprint.share:
        specs += ["copy_columns", "meet"]
    if blueprint.qk_norm == "width":
        specs.append("norm_columns")
    if blueprint.norm_after:
        specs.append("add_norm")
    if blueprint.residual_scale != 1 or blueprint.output_bias or blueprint.experts:
        specs.append("add")
    if blueprint.logit_scale != 1 or blueprint.logit_softcap:
        specs.append(f"cap_logits:{int(bool(blueprint.logit_softcap))}")
    if blueprint.experts:
        specs += ["route", "sort_rows", "pick_rows:q8", "combine"]
    return sorted(set(specs))
