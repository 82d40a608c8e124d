"""Frequencies of the rotary embedding from a model's configuration, with every kind of scaling.

The formulas are those of transformers' `modeling_rope_utils.py`; papers are named where they are
used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twinphase.blueprint import Rope
from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.models.config import FIX, Config

SCALINGS = ("default", "none", "linear", "llama3", "yarn", "longrope")


def make_rope(
    config: Config,
    head_dim: int,
    *,
    theta: float = 10000.0,
    theta_field: str = "rope_theta",
    layer_type: str | None = None,
    permuted_in_gguf: bool = False,
    interleaved: bool = False,
    **defaults: Any,
) -> Rope:
    """The rotation that a configuration asks for.

    Args:
        config: of the model.
        head_dim: dimensions of a head.
        theta: frequency base of a configuration that names none.
        theta_field: where it is named.
        layer_type: for models with several, such as "sliding_attention": whose entry in
            `rope_parameters` counts. Scaling that is not given by layer type holds for
            "full_attention" alone.
        permuted_in_gguf: whether GGUF's converter reorders queries and keys so that pairs lie side
            by side.
        interleaved: whether the pairs of this architecture lie side by side in both formats.
        defaults: for missing fields of the scaling.

    Raises:
        UnsupportedModelError: a scaling that is not known.
        CheckpointError: a field that is missing or absurd.
    """
    scaling, theta = _scaling(config, theta, theta_field, layer_type)
    scaling = defaults | dict(scaling)
    rotated = float(
        scaling.get("partial_rotary_factor") or config.fields.get("partial_rotary_factor") or 1.0
    )
    dim = config.integer("rotary_dim", int(head_dim * rotated))
    if dim % 2 or dim > head_dim:
        named = config.called("rotary_dim")
        raise CheckpointError(
            f"{config.name} rotates {dim} of the {head_dim} dimensions of a head ({named}).", FIX
        )
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    if "rope_factors_long.weight" in config.tensors:
        kind = "longrope"
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"{config.name} has RoPE scaling of type {kind!r}, which is not supported.",
            f"Known are: {', '.join(SCALINGS)}.",
        )
    magnitude = 1.0
    frequencies = plain
    if divisors := config.tensors.get(
        "rope_freqs.weight"
    ):  # Llama 3's scaling, worked out by the converter
        frequencies = [
            f / d for f, d in zip(plain, _fitting(divisors, len(plain), config), strict=True)
        ]
    elif kind == "linear":  # position interpolation (Chen et al., 2023, arXiv:2306.15595)
        frequencies = [f / _number(scaling, "factor", config) for f in plain]
    elif kind == "llama3":
        frequencies = _llama3(plain, scaling, config)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(plain, theta, scaling, config)
    elif kind == "longrope":
        frequencies, magnitude = _longrope(plain, scaling, config)
    return Rope(tuple(frequencies), interleaved or (config.is_gguf and permuted_in_gguf), magnitude)


def _scaling(
    config: Config, theta: float, theta_field: str, layer_type: str | None
) -> tuple[Mapping[str, Any], float]:
    """The scaling's fields and the frequency base; transformers 5 keeps both in `rope_parameters`."""
    parameters = config.table("rope_parameters")
    if isinstance(parameters.get(layer_type or ""), Mapping):
        parameters = parameters[layer_type or ""]
    elif layer_type == "sliding_attention" and not parameters:
        return {}, config.real(theta_field, theta)
    scaling = parameters or config.table("rope_scaling")
    found = scaling.get("rope_theta")
    base = (
        config.real(theta_field, theta) if found is None else _number(scaling, "rope_theta", config)
    )
    return scaling, base


def _number(
    scaling: Mapping[str, Any], field: str, config: Config, default: float | None = None
) -> float:
    value = scaling.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise CheckpointError(f"The RoPE scaling of {config.name} has {value!r} as {field}.", FIX)
    return float(value)


def _fitting(values: Any, count: int, config: Config) -> Sequence[float]:
    good = isinstance(values, (list, tuple)) and len(values) == count
    if not good or not all(isinstance(v, (int, float)) and 0 < v < 1e12 for v in values):
        raise CheckpointError(
            f"{config.name} needs {count} positive RoPE factors (rope_freqs.weight, long_factor).",
            FIX,
        )
    return tuple(values)


def _llama3(plain: list[float], scaling: Mapping[str, Any], config: Config) -> list[float]:
    """Long wavelengths are stretched, short ones stay (Grattafiori et al., 2024, arXiv:2407.21783)."""
    factor, original = (
        _number(scaling, f, config) for f in ("factor", "original_max_position_embeddings")
    )
    low, high = (_number(scaling, f, config) for f in ("low_freq_factor", "high_freq_factor"))
    out = []
    for f in plain:
        turns = original * f / (2 * math.pi)  # over the original context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


def _yarn(
    plain: list[float], theta: float, scaling: Mapping[str, Any], config: Config
) -> tuple[list[float], float]:
    """Interpolates by wavelength and sharpens attention (Peng et al., 2023, arXiv:2309.00071)."""
    dim = 2 * len(plain)
    factor = _number(scaling, "factor", config)
    length = config.integer("max_position_embeddings")
    original = _number(scaling, "original_max_position_embeddings", config, length)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(scaling, "beta_fast", config, 32.0))
    high = dimension(_number(scaling, "beta_slow", config, 1.0))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = max(high - low, 0.001)
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(plain))]
    frequencies = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def sharper(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        usual = sharper(_number(scaling, "mscale", config)) / sharper(
            _number(scaling, "mscale_all_dim", config)
        )
    else:
        usual = sharper(1.0)
    return frequencies, _number(scaling, "attention_factor", config, usual)


def _longrope(
    plain: list[float], scaling: Mapping[str, Any], config: Config
) -> tuple[list[float], float]:
    """A divisor for each frequency (Ding et al., 2024, arXiv:2402.13753).

    One set for short and one for long sequences: chosen once, by the longest sequence of this
    engine, since keys that were rotated by one must not meet queries that were rotated by the
    other.
    """
    length = config.integer("max_position_embeddings")
    original = scaling.get("original_max_position_embeddings") or config.fields.get(
        "original_max_position_embeddings"
    )
    original = _number(
        {"original_max_position_embeddings": original}, "original_max_position_embeddings", config
    )
    which = "long" if (config.max_positions or length) > original else "short"
    divisors = config.tensors.get(f"rope_factors_{which}.weight") or scaling.get(f"{which}_factor")
    factor = length / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = [
        f / d for f, d in zip(plain, _fitting(divisors, len(plain), config), strict=True)
    ]
    return frequencies, _number(scaling, "attention_factor", config, usual)
