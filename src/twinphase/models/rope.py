"""Computes the frequencies of RoPE from a model's configuration, with every kind of scaling.

The formulas are those of transformers' `modeling_rope_utils.py`; each function names its paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
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
    """The rotation in a configuration.

    Args:
        config: configuration of the model.
        head_dim: dimensions of a head.
        theta: default frequency base.
        theta_field: field of the frequency base.
        layer_type: key of `rope_parameters` in models with several layer types, such as
            "sliding_attention". Scaling without layer types applies only to "full_attention".
        permuted_in_gguf: whether GGUF's converter reorders queries and keys so that pairs are
            adjacent.
        interleaved: whether the pairs of this architecture are adjacent in both formats.
        defaults: for missing fields of the scaling.

    Raises:
        UnsupportedModelError: the scaling is not supported.
        CheckpointError: a field is missing or has an impossible value.
    """
    scaling, theta = _scaling(config, theta, theta_field, layer_type, defaults)
    fields = scaling.fields
    rotated = float(
        fields.get("partial_rotary_factor") or config.fields.get("partial_rotary_factor") or 1.0
    )
    dim = config.integer("rotary_dim", int(head_dim * rotated))
    if dim % 2 or dim > head_dim:
        named = config.called("rotary_dim")
        raise CheckpointError(
            f"{config.name} rotates {dim} of the {head_dim} dimensions of a head ({named}).", FIX
        )
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    method = fields.get("rope_type", fields.get("type")) or "default"
    if "rope_factors_long.weight" in config.tensors:
        method = "longrope"
    if method not in SCALINGS:
        raise UnsupportedModelError(
            f"{config.name} has RoPE scaling of type {method!r}, which is not supported.",
            f"Known are: {', '.join(SCALINGS)}.",
        )
    magnitude = 1.0
    frequencies = plain
    if divisors := config.tensors.get("rope_freqs.weight"):
        # These are Llama 3's scaling factors, computed by the converter.
        frequencies = _divided(plain, divisors, config)
    # This is position interpolation (Chen et al., 2023, arXiv:2306.15595).
    elif method == "linear":
        frequencies = [f / scaling.real("factor") for f in plain]
    elif method == "llama3":
        frequencies = _llama3(plain, scaling)
    elif method == "yarn":
        frequencies, magnitude = _yarn(plain, theta, scaling, config)
    elif method == "longrope":
        frequencies, magnitude = _longrope(plain, scaling, config)
    rope = Rope(tuple(frequencies), interleaved or (config.is_gguf and permuted_in_gguf), magnitude)
    if not fields.get("llama_4_scaling_beta"):
        return rope
    length = scaling.integer("original_max_position_embeddings")
    return replace(
        rope, temperature=scaling.real("llama_4_scaling_beta"), temperature_length=length
    )


def _scaling(
    config: Config,
    theta: float,
    theta_field: str,
    layer_type: str | None,
    defaults: dict[str, Any],
) -> tuple[Config, float]:
    """The scaling's fields and the base; transformers 5 keeps both in `rope_parameters`."""
    parameters = config.table("rope_parameters")
    if isinstance(parameters.get(layer_type or ""), Mapping):
        parameters = parameters[layer_type or ""]
    scaled = layer_type != "sliding_attention" or parameters
    fields = (parameters or config.table("rope_scaling")) if scaled else {}
    scaling = replace(config, fields=defaults | dict(fields), part="RoPE scaling", is_gguf=False)
    named = fields.get("rope_theta") is not None
    return scaling, scaling.real("rope_theta") if named else config.real(theta_field, theta)


def _divided(plain: list[float], divisors: Any, config: Config) -> list[float]:
    good = isinstance(divisors, (list, tuple)) and len(divisors) == len(plain)
    if not good or not all(isinstance(d, (int, float)) and 0 < d < 1e12 for d in divisors):
        raise CheckpointError(
            f"{config.name} needs {len(plain)} positive RoPE factors (rope_freqs.weight, "
            "long_factor).",
            FIX,
        )
    return [f / d for f, d in zip(plain, divisors, strict=True)]


def _llama3(plain: list[float], scaling: Config) -> list[float]:
    """Stretch long wavelengths only (Grattafiori et al., 2024, arXiv:2407.21783)."""
    factor = scaling.real("factor")
    original = scaling.real("original_max_position_embeddings")
    low = scaling.real("low_freq_factor")
    high = scaling.real("high_freq_factor")
    out = []
    for f in plain:
        turns = original * f / (2 * math.pi)  # The number of turns over the original context.
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


def _yarn(
    plain: list[float], theta: float, scaling: Config, config: Config
) -> tuple[list[float], float]:
    """Interpolates by wavelength and sharpens attention (Peng et al., 2023, arXiv:2309.00071)."""
    dim = 2 * len(plain)
    factor = scaling.real("factor")
    length = config.integer("max_position_embeddings")
    original = scaling.real("original_max_position_embeddings", length)

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.real("beta_fast", 32.0))
    high = dimension(scaling.real("beta_slow", 1.0))
    if scaling.fields.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = max(high - low, 0.001)
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(len(plain))]
    frequencies = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def sharper(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = sharper(1.0)
    if scaling.fields.get("mscale") and scaling.fields.get("mscale_all_dim"):
        usual = sharper(scaling.real("mscale")) / sharper(scaling.real("mscale_all_dim"))
    return frequencies, scaling.real("attention_factor", usual)


def _longrope(plain: list[float], scaling: Config, config: Config) -> tuple[list[float], float]:
    """A divisor for each frequency (Ding et al., 2024, arXiv:2402.13753).

    There is one set for short and one for long sequences. It is chosen once, by the engine's
    maximum length, because queries and keys must be rotated with the same set.
    """
    length = config.integer("max_position_embeddings")
    field = "original_max_position_embeddings"
    original = (scaling if scaling.fields.get(field) else config).real(field)
    which = "long" if (config.max_positions or length) > original else "short"
    divisors = config.tensors.get(f"rope_factors_{which}.weight")
    divisors = divisors or scaling.fields.get(f"{which}_factor")
    factor = length / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _divided(plain, divisors, config), scaling.real("attention_factor", usual)
