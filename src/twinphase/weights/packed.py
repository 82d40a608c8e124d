"""Converts quantized weights of Hugging Face folders to GGUF's formats.

FP8 becomes BF16, AWQ and GPTQ become Q4_0 or Q4_1, and MXFP4 stays MXFP4.

The 4-bit codes are not changed. In AWQ and GPTQ a weight is scale * (q - zero) with a float16 scale
per group of inputs and output; Q4_1 has scale * q + m, where only m = -scale * zero is rounded, to
float16. If every zero is 8, Q4_0 has exactly the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.source import FLOATS, Source, made_from_values

_Bytes = NDArray[np.uint8]
_FIX = "Fetch the model again."
_USE = "Use the model in FP8, AWQ or GPTQ with 4 bits, or unquantized."
# Settings for activations and the KV cache, which are not quantized according to the folder.
_NOT_OF_WEIGHTS = (
    "input_scale",
    "activation_scale",
    "input_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
)
# Some GPTQ writers add a bias of zeros here to models without biases.
_WITHOUT_BIAS = ("o_proj", "gate_proj", "up_proj", "down_proj")
# AutoAWQ's gemm kernel has this order of outputs in a word, lowest nibble first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpacked_tensors(sources: Mapping[str, Source], config: Mapping[str, Any]) -> dict[str, Source]:
    """The tensors, with every quantized matrix as one `X.weight` of a type in `FORMATS`.

    Args:
        sources: tensors by Hugging Face's names.
        config: the folder's config.json, whose `quantization_config` describes the weights.

    Raises:
        UnsupportedModelError: the method, width, packing or order is not supported.
        CheckpointError: parts of a quantized matrix are missing or do not fit each other.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return dict(sources)
    if not isinstance(settings, dict):
        raise CheckpointError("quantization_config of config.json is not an object.", _FIX)
    method = str(settings.get("quant_method", ""))[:60].lower()
    unpack = {
        "fp8": _fp8,
        "compressed-tensors": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }.get(method)
    if unpack is None:
        raise UnsupportedModelError(f"Quantization {method!r} is not supported.", _USE)
    _check_settings(method, settings)
    modules: dict[str, dict[str, Source]] = {}
    for name, source in sources.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in _NOT_OF_WEIGHTS:
            modules.setdefault(module, {})[leaf] = source
    found: dict[str, Source] = {}
    for module, parts in modules.items():
        for leaf, source in unpack(module, parts, settings).items():
            found[f"{module}.{leaf}" if module else leaf] = source
    return found


def _check_settings(method: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that would be misinterpreted; the message names them."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method in ("awq", "gptq") and bits != 4:
        raise UnsupportedModelError(f"{method.upper()} with {bits!r} bits is not supported.", _USE)
    allowed: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {
        "awq": {"version": (None, "gemm")},
        "gptq": {"checkpoint_format": (None, "gptq", "gptq_v2")},
        "compressed-tensors": {"format": (None, "float-quantized")},
    }
    for key, values in allowed.get(method, {}).items():
        value = settings.get(key)
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise UnsupportedModelError(
                f"{method} with {key} {str(value)[:60]!r} is not supported.", _USE
            )


# FP8
# ----------------------------------------


def _e4m3_values() -> NDArray[np.float32]:
    """All numbers of FP8 E4M3 (Micikevicius et al., 2022): exponent bias 7, no infinity."""
    codes = np.arange(256)
    exponent = codes >> 3 & 15
    fraction = codes & 7
    values = np.where(
        exponent > 0, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6)
    )
    values[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def _fp8(module: str, parts: dict[str, Source], settings: Mapping[str, Any]) -> dict[str, Source]:
    scale = parts.pop("weight_scale_inv", None) or parts.pop("weight_scale", None)
    weight = parts.get("weight")
    if weight is None or weight.type != "F8_E4M3":
        return parts
    if scale is None or scale.type not in FLOATS or len(weight.shape) != 2:
        raise CheckpointError(f"{module} has FP8 weights without scales.", _FIX)
    rows, columns = weight.shape
    block = settings.get("weight_block_size")
    if scale.shape in ((), (1,)):
        spread = (rows, columns)
    elif scale.shape in ((rows,), (rows, 1)):
        spread = (1, columns)
    elif (
        isinstance(block, list)
        and len(block) == 2
        and all(type(side) is int and side > 0 for side in block)
        and scale.shape == (-(-rows // block[0]), -(-columns // block[1]))
    ):
        spread = (block[0], block[1])
    else:
        raise CheckpointError(
            f"The scales of {module} have shape {scale.shape}, its weights {weight.shape}.", _FIX
        )

    def values() -> NDArray[np.float32]:
        scales = scale.values().reshape(-(-rows // spread[0]), -(-columns // spread[1]))
        scales = np.repeat(np.repeat(scales, spread[0], axis=0)[:rows], spread[1], axis=1)[
            :, :columns
        ]
        return _e4m3_values()[weight.read().reshape(rows, columns)] * scales

    return {**parts, "weight": made_from_values((rows, columns), "BF16", values)}


# AWQ and GPTQ
# ----------------------------------------


def _awq(module: str, parts: dict[str, Source], settings: Mapping[str, Any]) -> dict[str, Source]:
    if "qweight" not in parts:
        return parts
    qweight, qzeros, scales = _four_bit_parts(module, parts)
    inputs = qweight.shape[0]
    outputs = qweight.shape[1] * 8
    group = _group_size(module, inputs, outputs, qzeros, scales, settings)

    # Converts int32 [n, outputs / 8] to uint8 [n, outputs].
    def outputs_in_order(source: Source) -> _Bytes:
        nibbles = _nibbles_of_words(source)
        out = np.empty_like(nibbles)
        out[:, :, _AWQ_ORDER] = nibbles
        return out.reshape(len(out), -1)

    matrix = _four_bit_matrix(
        (outputs, inputs),
        group,
        lambda: outputs_in_order(qweight),
        lambda: outputs_in_order(qzeros),
        scales,
    )
    return {**parts, "weight": matrix}


def _gptq(module: str, parts: dict[str, Source], settings: Mapping[str, Any]) -> dict[str, Source]:
    if "qweight" not in parts:
        return parts
    order = parts.pop("g_idx", None)
    qweight, qzeros, scales = _four_bit_parts(module, parts)
    inputs = qweight.shape[0] * 8
    outputs = qweight.shape[1]
    group = _group_size(module, inputs, outputs, qzeros, scales, settings)
    if (
        order is None
        and settings.get("desc_act")
        or order is not None
        and not _in_order(order, inputs, group)
    ):
        raise UnsupportedModelError(
            f"{module} is quantized by GPTQ in activation order (desc_act).", _USE
        )
    # The first version of the format stores zero - 1 in 4 bits.
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def codes() -> _Bytes:
        return _nibbles_of_words(qweight).swapaxes(1, 2).reshape(inputs, outputs)

    def zeros() -> _Bytes:
        return (_nibbles_of_words(qzeros).reshape(-1, outputs) + np.uint8(less)) & np.uint8(15)

    if module.endswith(_WITHOUT_BIAS) and "bias" in parts and not parts["bias"].read().any():
        del parts["bias"]
    return {**parts, "weight": _four_bit_matrix((outputs, inputs), group, codes, zeros, scales)}


def _in_order(order: Source, inputs: int, group: int) -> bool:
    return order.type == "I32" and np.array_equal(
        order.read().view(np.int32), np.arange(inputs) // group
    )


def _four_bit_parts(module: str, parts: dict[str, Source]) -> tuple[Source, Source, Source]:
    """Remove and return qweight, qzeros and scales."""
    taken = tuple(parts.pop(leaf, None) for leaf in ("qweight", "qzeros", "scales"))
    qweight, qzeros, scales = taken
    if qweight is None or qzeros is None or scales is None:
        raise CheckpointError(f"{module} lacks its qweight, qzeros or scales.", _FIX)
    if (qweight.type, qzeros.type) != ("I32", "I32") or scales.type not in FLOATS:
        types = ", ".join((qweight.type, qzeros.type, scales.type))
        raise CheckpointError(
            f"qweight, qzeros and scales of {module} have the types {types}.", _FIX
        )
    if any(len(part.shape) != 2 for part in (qweight, qzeros, scales)):
        raise CheckpointError(f"qweight, qzeros and scales of {module} are not all matrices.", _FIX)
    return qweight, qzeros, scales


def _group_size(
    module: str,
    inputs: int,
    outputs: int,
    qzeros: Source,
    scales: Source,
    settings: Mapping[str, Any],
) -> int:
    """The number of inputs that share a scale."""
    groups = scales.shape[0]
    group = inputs // groups if groups and inputs % groups == 0 else 0
    stated = settings.get("group_size", settings.get("q_group_size", group))
    fits = scales.shape == (groups, outputs) and qzeros.shape == (groups, outputs // 8)
    if not group or stated not in (group, -1) or not fits:
        raise CheckpointError(
            f"{module}: scales {scales.shape} and zeros {qzeros.shape} do not fit {outputs} "
            f"outputs of {inputs} inputs "
            f"in groups of {stated!r}.",
            _FIX,
        )
    if group % 32:
        raise UnsupportedModelError(
            f"{module} has groups of {group} inputs.", "Use one with groups of 32, 64 or 128."
        )
    return group


def _nibbles_of_words(source: Source) -> _Bytes:
    """Convert int32 [a, b] to uint8 [a, b, 8], lowest nibble first."""
    words = source.read().view("<u4").reshape(source.shape)
    return (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.uint8)


def _four_bit_matrix(
    shape: tuple[int, int],
    group: int,
    codes: Callable[[], _Bytes],
    zeros: Callable[[], _Bytes],
    scales: Source,
) -> Source:
    """A Q4_0 or Q4_1 matrix.

    Args:
        shape: (outputs, inputs).
        group: number of inputs that share a scale, a multiple of 32.
        codes: uint8 [inputs, outputs].
        zeros: uint8 [inputs / group, outputs].
        scales: [inputs / group, outputs].
    """
    # The zeros are read at once, because the type must be known; they are a small part of the data.
    symmetric = bool((zeros() == 8).all())

    def read() -> _Bytes:
        outputs, inputs = shape
        q = np.ascontiguousarray(codes().T).reshape(outputs, inputs // 32, 32)
        packed = q[..., :16] | q[..., 16:] << 4
        scale = scales.values().T  # The shape is [outputs, groups].
        parameters = [scale] if symmetric else [scale, -scale * zeros().T.astype(np.float32)]
        halves = [
            np.repeat(values.astype(np.float16), group // 32, axis=1)[..., None].view(np.uint8)
            for values in parameters
        ]
        return np.concatenate([*halves, packed], axis=-1).reshape(-1)

    return Source(shape, "Q4_0" if symmetric else "Q4_1", read)


# MXFP4
# ----------------------------------------


_MXFP4_ROWS = {
    "gate_up_proj": {"gate": slice(0, None, 2), "up": slice(1, None, 2)},
    "down_proj": {"down": slice(None)},
}


def _mxfp4(module: str, parts: dict[str, Source], _: Mapping[str, Any]) -> dict[str, Source]:
    """GPT-OSS's experts: rows of gate and up alternate in one stacked tensor."""
    found = dict(parts)
    for what, rows in _MXFP4_ROWS.items():
        blocks = found.pop(f"{what}_blocks", None)
        scales = found.pop(f"{what}_scales", None)
        if blocks is None and scales is None:
            continue
        if (
            blocks is None
            or scales is None
            or (blocks.type, scales.type) != ("U8", "U8")
            or blocks.shape != (*scales.shape, 16)
            or len(scales.shape) != 3
        ):
            raise CheckpointError(
                f"{module} lacks {what}_blocks or {what}_scales, or they do not fit.", _FIX
            )
        for part, chosen in rows.items():
            found[f"{part}_proj.weight"] = _mxfp4_rows(blocks, scales, chosen)
    return found


def _mxfp4_rows(blocks: Source, scales: Source, chosen: slice) -> Source:
    """Some rows of every expert in GGUF's layout.

    A block is an exponent and 16 bytes. Byte j has the values 2j and 2j + 1 in the folder, and j
    and j + 16 in GGUF.
    """
    experts, rows, count = scales.shape
    shape = (experts, len(range(rows)[chosen]), count * 32)

    def read() -> _Bytes:
        pairs = blocks.read().reshape(blocks.shape)[:, chosen]
        values = np.stack([pairs & 0x0F, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 32)
        exponents = scales.read().reshape(scales.shape)[:, chosen, :, None]
        return np.concatenate(
            [exponents, values[..., :16] | values[..., 16:] << 4], axis=-1
        ).reshape(-1)

    return Source(shape, "MXFP4", read)
