"""Converts the options of `twinphase estimate` to hardware, a request, and drafting."""

from __future__ import annotations

from dataclasses import replace

from twinphase.backends.base import Units
from twinphase.backends.device import open_device
from twinphase.config import EngineConfig, free_memory
from twinphase.engine.loading.ceilings import device_of, measured_ceilings
from twinphase.errors import InvalidRequestError
from twinphase.estimate.estimate import estimate
from twinphase.estimate.inputs import (
    Drafting,
    Hardware,
    Scenario,
    bytes_per_weight,
    datasheet_hardware,
    units_for,
)
from twinphase.estimate.known_models import read_shape
from twinphase.estimate.options import DTYPES, PRECISIONS, EstimateOptions
from twinphase.estimate.shapes import DecoderShape
from twinphase.speculative import HEADS, speculative_config

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def drafting_of(options: EstimateOptions, hardware: Hardware) -> Drafting | None:
    """The assumed speculation; a draft model runs on the same hardware."""
    config = speculative_config(options.speculative_config)
    acceptance = options.acceptance
    if (config.method == "none") != (acceptance is None):
        raise InvalidRequestError(
            "--speculative-config and --acceptance belong together.",
            "Give both, such as ngram and 0.7, or neither.",
        )
    if acceptance is None:
        return None
    seconds: float | None = None if config.method in (*HEADS, "mtp") else 0.0
    if config.method == "draft_model":
        shape = read_shape(config.model)
        step = estimate(shape, hardware, scenario_of(shape, options)).decode.seconds
        seconds = None if step is None else step * config.num_speculative_tokens
    return Drafting(config.num_speculative_tokens, acceptance, seconds)


def _number(option: str, text: str | None) -> float | None:
    """A positive number with an optional decimal suffix (k, M, G, T, P); None if not given."""
    if text is None:
        return None
    factor = SUFFIXES.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidRequestError(
            f"{option} is {text!r}.", "Use a number above 0 such as 312T (k, M, G, T, P)."
        )
    return value


def hardware_of(options: EstimateOptions) -> Hardware:
    """The hardware that --hardware names; figures given as options replace its own."""
    name = options.hardware
    devices = options.devices
    given = {option: getattr(options, option) for option in ("flops", "bandwidth", "memory")}
    figures = {option: _number(f"--{option}", text) for option, text in given.items()}
    named = [f"--{option} {text}" for option, text in given.items() if text is not None]
    peaks = dict.fromkeys(PRECISIONS, figures["flops"]) if figures["flops"] else {}
    if name is None:
        if figures["flops"] is None or figures["bandwidth"] is None:
            raise InvalidRequestError(
                "estimate needs --hardware, or --flops with --bandwidth.",
                "`twinphase estimate --list-hardware` lists the names; `this` is this machine.",
            )
        title = ", ".join(named)
        return Hardware(title, "given", peaks, figures["bandwidth"], figures["memory"], devices)
    if name == "this" and devices > 1:
        raise InvalidRequestError(
            f"--devices is {devices} with --hardware this.", "This machine is one device."
        )
    found = this_machine(options.backend) if name == "this" else datasheet_hardware(name)
    notes = (
        *([f"Given instead of its own figures: {', '.join(named)}."] if named else []),
        *found.notes,
    )
    return replace(
        found,
        peaks={**found.peaks, **peaks},
        bandwidth=figures["bandwidth"] or found.bandwidth,
        memory=figures["memory"] or found.memory,
        devices=devices,
        notes=notes,
    )


def this_machine(backend: str = "cpu") -> Hardware:
    """The measured figures of this machine with a backend.

    Raises:
        InvalidRequestError: the machine was not measured.
    """
    config = EngineConfig(backend=backend)
    ceilings = measured_ceilings(config)
    if ceilings is None:
        command = "twinphase roofline" + ("" if backend == "cpu" else f" --backend {backend}")
        raise InvalidRequestError(
            "This machine has not been measured yet.", f"Run `{command}` first."
        )
    title = f"{ceilings.processor}, {ceilings.threads} threads, {ceilings.isa}"
    notes = ["Measured here at its best; memory is what is free now."]
    if ceilings.provisional:
        notes += [
            "The measurement was disturbed: peaks may be too low. `twinphase roofline` measures "
            "again."
        ]
    return Hardware(
        title,
        "measured here",
        {},
        None,
        device_of(config).free_memory() or free_memory(),
        ceilings=ceilings,
        notes=tuple(notes),
    )


def scenario_of(shape: DecoderShape, options: EstimateOptions) -> Scenario:
    """The request that the options of `estimate` describe."""
    here = options.hardware == "this"
    kv_dtype = options.kv_cache_dtype
    dtype = options.dtype or ""
    if dtype:
        bytes_per_weight(dtype)  # This refuses an unknown name before anything is computed.
    b = shape.blueprint
    if here and kv_dtype in ("auto", "int8"):
        device = open_device(options.backend)
        kv_bytes = b.kv_bytes(lambda dim: device.kv_head_bytes(dim, kv_dtype))
    else:
        each = 2 if kv_dtype == "auto" else DTYPES[kv_dtype]
        kv_bytes = b.kv_bytes(lambda dim: 2 * dim * each)
    kv_head_bytes = kv_bytes / b.kv_bytes(lambda dim: 1)
    return Scenario(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        batch_size=options.batch_size,
        units=_units(
            dtype or shape.dtype, options.compute_dtype, options.backend if here else None
        ),
        dtype=dtype,
        kv_head_bytes=kv_head_bytes,
        mfu=options.mfu,
        mbu=options.mbu,
        price_per_hour=options.price_per_hour,
    )


def _units(dtype: str, compute_dtype: str | None, backend: str | None) -> Units:
    if compute_dtype is not None:
        return Units(compute_dtype, compute_dtype, compute_dtype)
    if backend is None:
        return units_for(dtype)
    units = open_device(backend).units({(dtype.upper().replace("FP", "F"), 2)})
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # Names as in datasheets.
    return Units(*(names.get(unit, unit) for unit in (units.linear, units.scores, units.values)))
