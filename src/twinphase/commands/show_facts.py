"""Collects the facts for `twinphase show` as plain values."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from twinphase.backends.device import open_device
from twinphase.blueprint import Blueprint
from twinphase.commands.estimate_options import scenario_of, this_machine
from twinphase.config import KV_CACHE_DTYPES
from twinphase.errors import InvalidRequestError, ModelNotFoundError, TwinphaseError
from twinphase.estimate.estimate import estimate, warnings
from twinphase.estimate.options import EstimateOptions
from twinphase.estimate.shapes import DecoderShape, from_checkpoint
from twinphase.models.encoders import read_encoder
from twinphase.models.loader import open_model
from twinphase.models.share import rank_sizes
from twinphase.models.tasks import is_encoder, is_raw_score, own_pooling
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.gguf import quantization_name
from twinphase.weights.hub import cached_model

# Prompt length of the request whose phases are estimated.
PROMPT_TOKENS = 512


def model_facts(name: str, ranks: int = 1) -> dict[str, Any]:
    """Everything that `show` prints, as plain values; an encoder "embeds" or "scores".

    Raises:
        ModelNotFoundError: there is no such model on this machine.
        InvalidRequestError: the model cannot be divided among `ranks`.
        TwinphaseError: the model cannot be read, or its architecture is not supported.
    """
    checkpoint = open_model(_local(name), header_only=True)
    if is_encoder(checkpoint):
        if ranks > 1:
            raise InvalidRequestError(
                f"{name} embeds in one process.", "Leave --tensor-parallel-size out."
            )
        return _encoder(checkpoint, name)
    shape = from_checkpoint(checkpoint, name)
    b = shape.blueprint
    return {
        "name": name,
        "path": str(checkpoint.path),
        "architecture": b.architecture,
        "parameters": {"total": shape.total_parameters, "active": shape.active_parameters}
        | vars(shape.parameters),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "quantization": shape.dtype,
        "formats": _formats(checkpoint),
        "context_length": b.context_length,
        "layers": {
            **{
                field: getattr(b, field)
                for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim")
            },
            **{
                field: getattr(b, field)
                for field in ("hidden_size", "ffn_size", "vocab_size", "tied")
            },
            "experts": None
            if b.experts is None
            else {
                **{field: getattr(b.experts, field) for field in ("count", "used", "ffn_size")},
                "shared": int(b.experts.shared_size > 0),
                "dense_layers": b.dense_layers,
            },
            "window": next((window for window in b.windows if window), None),
            "windowed_layers": sum(window is not None for window in b.windows),
            "recurrent_layers": len(b.recurrent_layers),
            "attention_layers": b.num_attention_layers,
            "draft_layers": b.draft_layers,
            "full_kv": vars(b.full_kv) if b.full_kv else None,
            "shared_kv_layers": b.shared_kv_layers,
            "layer_embedding_size": b.layer_embedding_size,
        },
        "state_bytes": b.state_bytes(),
        "kv_cache": _kv_cache(b),
        **({"ranks": _ranks(checkpoint, b, ranks)} if ranks > 1 else {}),
        **_text(checkpoint),
        "here": _both_phases(shape),
    }


def _encoder(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    shape = read_encoder(checkpoint)
    sizes = ("num_layers", "num_heads", "hidden_size", "ffn_size", "vocab_size")
    return {
        "name": name,
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "parameters": {"total": sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())},
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "quantization": quantization_name(checkpoint),
        "formats": _formats(checkpoint),
        "context_length": shape.context_length,
        "layers": {size: getattr(shape, size) for size in sizes},
        **(
            {"scores": {"raw": is_raw_score(checkpoint)}}
            if own_pooling(checkpoint) == "rank"
            else {"embeds": {"dimensions": shape.hidden_size, "pooling": own_pooling(checkpoint)}}
        ),
        **_tokenizer(checkpoint)[1],
    }


def _local(name: str) -> Path:
    path = cached_model(name)
    if path is None:
        raise ModelNotFoundError(
            f"{name} is not on this machine.", f"Fetch it with `twinphase pull {name}`."
        )
    return path


def _formats(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Number of tensors and bytes by storage type, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in checkpoint.tensors.values():
        one = found.setdefault(tensor.type, {"type": tensor.type, "tensors": 0, "bytes": 0})
        one["tensors"] += 1
        one["bytes"] += tensor.nbytes
    return sorted(found.values(), key=lambda one: -one["bytes"])


def _kv_cache(b: Blueprint) -> dict[str, dict[str, int]]:
    """KV bytes by `kv_cache_dtype`: per token, at the full context, and read by a step there."""
    device = open_device("cpu")
    full = b.context_length
    attended = [
        (min(full, window or full), b.kv_shape(layer))
        for layer, window in enumerate(b.windows)
        if b.attends(layer)
    ]
    found = {}
    for dtype in KV_CACHE_DTYPES:
        head_bytes = partial(device.kv_head_bytes, dtype=dtype)
        token = b.kv_bytes(head_bytes)
        read = sum(
            tokens * shape.num_heads * head_bytes(shape.head_dim) for tokens, shape in attended
        )
        found[dtype] = {"token": round(token), "held": round(full * token), "read": round(read)}
    return found


def _ranks(checkpoint: Checkpoint, b: Blueprint, count: int) -> list[dict[str, Any]]:
    """The share of each rank: weight bytes, KV heads, and bytes per token by `kv_cache_dtype`."""
    return [
        {
            "weights": weights,
            "kv_heads": share.num_kv_heads,
            "kv_token": {dtype: sizes["token"] for dtype, sizes in _kv_cache(share).items()},
            **({"state_bytes": share.state_bytes()} if share.recurrent_layers else {}),
        }
        for weights, share in rank_sizes(checkpoint, b, count)
    ]


def _text(checkpoint: Checkpoint) -> dict[str, Any]:
    """Tokenizer and template; `problem` says why one of them cannot be used."""
    tokenizer, about = _tokenizer(checkpoint)
    found: dict[str, Any] = {**about, "chat_template": False, "tools": False, "thinking": False}
    if tokenizer is None:
        return found
    try:
        template = ChatTemplate.from_checkpoint(checkpoint, tokenizer)
    except TwinphaseError as error:
        return found | {"problem": f"{error.cause} {error.fix}"}
    if template.is_fallback:
        return found | {"fallback_template": template.fallback or "none: contents alone"}
    return found | {
        "chat_template": True,
        "tools": template.supports_tools,
        "thinking": template.think_tags is not None,
    }


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, dict[str, Any]]:
    try:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    except TwinphaseError as error:
        return None, {"tokenizer": None, "problem": f"{error.cause} {error.fix}"}
    kind = tokenizer.spelling.name.lower().replace("_", "-")
    return tokenizer, {"tokenizer": {"kind": kind, "vocab_size": tokenizer.vocab_size}}


def _both_phases(shape: DecoderShape) -> dict[str, Any] | None:
    """Bounds of both phases from this machine's measured ceilings; None without measurements."""
    prompt = max(1, min(PROMPT_TOKENS, shape.blueprint.context_length - 1))
    options = EstimateOptions(hardware="this", prompt_tokens=prompt, output_tokens=2)
    try:
        hardware = this_machine()
    except InvalidRequestError:
        return None
    result = estimate(shape, hardware, scenario_of(shape, options))
    return {
        "hardware": hardware.name,
        "prompt_tokens": prompt,
        "ttft_seconds": result.prefill.seconds,
        "ttft_bound": result.prefill.bound,
        "tpot_seconds": result.decode.seconds,
        "tpot_bound": result.decode.bound,
        "warnings": list(warnings(result)),
        "notes": list(hardware.notes),
    }
