"""Quantizes a folder's matrices while they are loaded.

The gguf package quantizes to Q8_0, Q5_0 and Q4_0, bit-identical to llama.cpp; Q4_K follows
llama.cpp's `make_qkx2_quants` in NumPy with fewer trials. `packed.py` reads quantized folders.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from twinphase.config import available_cores
from twinphase.errors import InvalidRequestError
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.quant import dequantize, tensor_nbytes
from twinphase.weights.source import FLOATS, Source

_Floats = NDArray[np.float32]
QUANTIZATIONS: Mapping[str, str | None] = {
    "none": None,
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_k": "Q4_K",
}
# Errors in these matrices matter more than in others, and one matrix is often both.
_EMBEDDINGS = ("token_embd.weight", "output.weight")
# These are small, and errors in the choice of an expert or in a decay matter more than their bytes.
_KEPT = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "position_embd.weight",
    "token_types.weight",
    "ssm_alpha.weight",
    "ssm_beta.weight",
)
# A chunk and its intermediate results should fit into a second-level cache.
_CHUNK_VALUES = 1 << 17
# Trials of a scale: 15 steps between the smallest and the largest value, plus these numbers.
_TRIALS = (-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9)


def quantized_tensors(sources: Mapping[str, Source], quantization: str) -> dict[str, Source]:
    """The tensors, with float matrices quantized when read; vectors and routers are not changed.

    Args:
        sources: tensors by GGUF's names.
        quantization: "none", "q8_0", "q4_0" or "q4_k". Embedding and head always become Q8_0; rows
            that are not a whole number of Q4_K's blocks become Q5_0, as in llama.cpp.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    if quantization not in QUANTIZATIONS:
        raise InvalidRequestError(
            f"quantization is {quantization!r}.", f"Use one of: {', '.join(QUANTIZATIONS)}."
        )
    wanted = QUANTIZATIONS[quantization]
    if wanted is None:
        return dict(sources)
    return {
        name: _quantized(source, _type(name, source, wanted)) for name, source in sources.items()
    }


def _type(name: str, source: Source, wanted: str) -> str:
    """The type that a tensor is converted to, or its own type."""
    if (
        source.type not in FLOATS
        or len(source.shape) < 2
        or not name.endswith(".weight")
        or name.endswith(_KEPT)
    ):
        return source.type
    columns = source.shape[-1]
    chosen = (
        "Q8_0"
        if name in _EMBEDDINGS
        else "Q5_0"
        if columns % FORMATS[wanted].block_size
        else wanted
    )
    return source.type if columns % FORMATS[chosen].block_size else chosen


def _quantized(source: Source, type: str) -> Source:
    if type == source.type:
        return source
    columns = source.shape[-1]

    def read() -> NDArray[np.uint8]:
        raw = source.read()
        raw = raw.reshape(-1, tensor_nbytes((columns,), source.type))
        out = np.empty((len(raw), tensor_nbytes((columns,), type)), np.uint8)
        rows = max(1, _CHUNK_VALUES // columns)

        def chunk(start: int) -> None:
            part = raw[start : start + rows]
            values = dequantize(part.reshape(-1), (len(part), columns), source.type)
            out[start : start + rows] = quantize(values, type)

        from concurrent.futures import ThreadPoolExecutor  # Most runs quantize nothing.

        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(chunk, range(0, len(raw), rows)))
        return out.reshape(-1)

    return Source(source.shape, type, read)


def quantize(values: _Floats, type: str) -> NDArray[np.uint8]:
    """Convert float32 [N, K] to blocks, uint8 [N, bytes per row]: Q4_K, or one of gguf's types."""
    # A block of zeros, or of values close to zero, has no inverse scale; its codes are zero.
    with np.errstate(all="ignore"):
        if type == "Q4_K":
            return _q4_k(values)
        from gguf import GGMLQuantizationType, quants

        return np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[type])).view(
            np.uint8
        )


def _q4_k(values: _Floats) -> NDArray[np.uint8]:
    """w = d * scale * code - dmin * minimum, with scale and minimum of 6 bits per 32 values."""
    x = values.reshape(-1, 8, 32)
    scale, minimum = _group_scales(x)
    d = scale.max(axis=1, keepdims=True) / 63
    dmin = minimum.max(axis=1, keepdims=True) / 63
    d = d.astype(np.float16)
    dmin = dmin.astype(np.float16)

    def six_bits(numbers: _Floats, unit: NDArray[np.float16]) -> NDArray[np.uint8]:
        return (
            np.nan_to_num(np.rint(numbers / unit.astype(np.float32)), posinf=0)
            .clip(0, 63)
            .astype(np.uint8)
        )

    scales = six_bits(scale, d)
    minima = six_bits(minimum, dmin)
    step = (d * scales.astype(np.float32))[..., None]
    codes = np.rint((x + (dmin * minima.astype(np.float32))[..., None]) / step)
    q = np.nan_to_num(codes, posinf=0, neginf=0).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, nibbles], axis=1).reshape(
        len(values), -1
    )


def _group_scales(x: _Floats) -> tuple[_Floats, _Floats]:
    """Scale and minimum (to subtract) per group: float32 [blocks, 8, 32] to [blocks, 8] each.

    Each trial rounds with another scale, and then solves for the scale and the minimum with the
    least weighted squared error; large values have more weight.
    """
    groups = x.shape[:2]
    x = np.ascontiguousarray(
        x.reshape(-1, 32).T
    )  # Sums run along the first axis, over all groups at once.
    weight = np.sqrt((x * x).mean(axis=0)) + np.abs(x)
    low = np.minimum(x.min(axis=0), 0)
    spread = x.max(axis=0) - low
    inverse = np.where(spread > 0, 1 / spread, 0)
    weighted_x = weight * x
    shifted = x - low
    sum_w = weight.sum(axis=0)
    sum_x = weighted_x.sum(axis=0)
    best_scale = spread / 15
    best_minimum = -low
    best_error = np.full(sum_w.shape, np.inf, np.float32)
    for trial in _TRIALS:
        codes = np.rint(shifted * ((15 + trial) * inverse))
        np.minimum(codes, 15, out=codes)
        weighted = weight * codes
        sum_l = weighted.sum(axis=0)
        sum_xl = (weighted_x * codes).sum(axis=0)
        sum_l2 = np.multiply(weighted, codes, out=weighted).sum(axis=0)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        minimum = (sum_l * sum_xl - sum_l2 * sum_x) / determinant
        # A minimum above zero cannot be stored; then this scale alone has the least error.
        scale = np.where(minimum < 0, sum_xl / sum_l2, scale)
        minimum = np.maximum(minimum, 0)
        # The weighted squared error without the term that is the same in all trials.
        error = scale * (scale * sum_l2 - 2 * (sum_xl + minimum * sum_l)) + minimum * (
            minimum * sum_w + 2 * sum_x
        )
        # This is False if the system has no solution, because all values are equal.
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
    return best_scale.reshape(groups), best_minimum.reshape(groups)
