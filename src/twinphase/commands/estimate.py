"""`twinphase estimate`: the arithmetic of both phases for a model, a machine and a request.

Runs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from twinphase.errors import InvalidRequestError

if TYPE_CHECKING:
    from twinphase.backends.base import Units
    from twinphase.estimate.inputs import Drafting, Hardware, Scenario
    from twinphase.estimate.shapes import DecoderShape

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def estimate(
    name: str = typer.Argument(
        None,
        metavar="MODEL",
        help="A known name, a config.json or its folder, a .gguf file, or a model in the cache.",
    ),
    model: str = typer.Option(None, help="The same as MODEL, given as an option."),
    hardware: str = typer.Option(
        None, help="Name of a datasheet, or `this`: what `twinphase roofline` measured here."
    ),
    backend: str = typer.Option(
        "cpu",
        help="With --hardware this, the backend that was measured: cpu or torch.",
    ),
    prompt_tokens: int = typer.Option(
        1000,
        "--prompt-tokens",
        "--input-len",
        help="Prompt tokens per request.",
    ),
    output_tokens: int = typer.Option(
        200,
        "--output-tokens",
        "--output-len",
        help="Output tokens per request.",
    ),
    batch_size: int = typer.Option(1, help="Requests that decode together."),
    dtype: str = typer.Option(
        None,
        help="Storage type of the weights: fp16, fp8, int4, Q4_0, ... "
        "[default: as in the model's file]",
    ),
    kv_cache_dtype: str = typer.Option(
        "auto",
        help="Storage type of keys and values: fp32, fp16, bf16, fp8 or int8. auto is 16 bits; "
        "with --hardware this, "
        "what the engine stores.",
    ),
    compute_dtype: str = typer.Option(
        None, help="Precision of the arithmetic. [default: follows --dtype]"
    ),
    mfu: float = typer.Option(1.0, help="Assumed share of the peak FLOP/s; 1 gives the bound."),
    mbu: float = typer.Option(1.0, help="Assumed share of the bandwidth; 1 gives the bound."),
    flops: str = typer.Option(None, help="Peak FLOP/s, instead of the datasheet's, e.g. 312T."),
    bandwidth: str = typer.Option(
        None,
        help="Memory bandwidth in bytes/s, instead of the datasheet's, e.g. 2.039T.",
    ),
    memory: str = typer.Option(
        None,
        help="Memory in bytes, instead of the datasheet's, e.g. 80G.",
    ),
    devices: int = typer.Option(1, help="Number of devices that share every layer."),
    price_per_hour: float = typer.Option(
        None, help="Price per hour of all devices together; gives the cost per million tokens."
    ),
    speculative_config: str = typer.Option(
        None,
        help="Speculative decoding, as for `serve`: a method or an object of vLLM's keys.",
    ),
    acceptance: float = typer.Option(
        None,
        help="Assumed chance that a drafted token is right where those before it are. [needs "
        "--speculative-config]",
    ),
    explain: bool = typer.Option(False, "--explain", help="Print each formula with its numbers."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    list_hardware: bool = typer.Option(
        False, "--list-hardware", help="List the datasheets, each figure with its source."
    ),
    list_models: bool = typer.Option(False, "--list-models", help="List the models known by name."),
) -> None:
    """Estimate both phases from first principles: TTFT, decode rate, memory, batch sizes, cost."""
    given = locals()
    from twinphase.commands import estimate_view as view

    if list_hardware or list_models:
        view.show_hardware(json) if list_hardware else view.show_models(json)
        return
    if name is not None and model is not None:
        raise InvalidRequestError(
            f"Two models are given: {name!r} and --model {model!r}.", "Give one."
        )
    model = model if name is None else name
    if model is None:
        raise InvalidRequestError(
            "estimate needs a MODEL.", "`twinphase estimate --list-models` lists the known ones."
        )
    from twinphase.estimate.estimate import estimate as compute
    from twinphase.estimate.known_models import read_shape

    shape = read_shape(model)
    machine = _hardware(given)
    result = compute(shape, machine, scenario_of(shape, given), _drafting(given, machine))
    if json:
        view.print_json(result)
    else:
        view.show_estimate(result, explain)


def _drafting(given: dict[str, Any], hardware: Hardware) -> Drafting | None:
    """Assumed speculation by the options; a draft model runs on the same hardware."""
    from twinphase.estimate.estimate import estimate as compute
    from twinphase.estimate.inputs import Drafting
    from twinphase.estimate.known_models import read_shape
    from twinphase.speculative import HEADS, speculative_config

    config = speculative_config(given["speculative_config"])
    if (config.method == "none") != (given["acceptance"] is None):
        raise InvalidRequestError(
            "--speculative-config and --acceptance belong together.",
            "Give both, such as ngram and 0.7, or neither.",
        )
    if config.method == "none":
        return None
    seconds: float | None = None if config.method in HEADS else 0.0
    if config.method == "draft_model":
        shape = read_shape(config.model)
        step = compute(shape, hardware, scenario_of(shape, given)).decode.seconds
        seconds = None if step is None else step * config.num_speculative_tokens
    return Drafting(config.num_speculative_tokens, given["acceptance"], seconds)


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


def _hardware(given: dict[str, Any]) -> Hardware:
    """What --hardware names; figures given as options replace its own."""
    from dataclasses import replace

    from twinphase.estimate.datasheets import PRECISIONS
    from twinphase.estimate.inputs import Hardware, datasheet_hardware

    name = given["hardware"]
    devices = given["devices"]
    figures = {
        option: _number(f"--{option}", given[option]) for option in ("flops", "bandwidth", "memory")
    }
    named = [
        f"--{option} {given[option]}" for option, value in figures.items() if value is not None
    ]
    if not 1 <= devices <= 1 << 20:
        raise InvalidRequestError(f"--devices is {devices}.", "Use a number from 1.")
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
    found = this_machine(given["backend"]) if name == "this" else datasheet_hardware(name)
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
    """What was measured here with a backend.

    Raises:
        InvalidRequestError: nothing was.
    """
    from twinphase.config import EngineConfig, free_memory
    from twinphase.engine.loading.ceilings import device_of, measured_ceilings
    from twinphase.estimate.inputs import Hardware

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


def scenario_of(shape: DecoderShape, given: dict[str, Any]) -> Scenario:
    """The request that the options of `estimate` describe."""
    from twinphase.estimate.inputs import DTYPES, Scenario, bytes_per_weight

    here = given["hardware"] == "this"
    kv_dtype = given["kv_cache_dtype"]
    dtype = given["dtype"] or ""
    if dtype:
        bytes_per_weight(dtype)  # refuses an unknown name before anything is computed
    if kv_dtype not in ("auto", *DTYPES):
        raise InvalidRequestError(
            f"--kv-cache-dtype is {kv_dtype!r}.", f"Use auto or one of: {', '.join(DTYPES)}."
        )
    if here and kv_dtype in ("auto", "int8"):
        from twinphase.backends.device import open_device

        kv_head_bytes = open_device(given["backend"]).kv_head_bytes(
            shape.blueprint.head_dim, kv_dtype
        )
    else:
        kv_head_bytes = (
            2 * shape.blueprint.head_dim * (2 if kv_dtype == "auto" else DTYPES[kv_dtype])
        )
    return Scenario(
        prompt_tokens=given["prompt_tokens"],
        output_tokens=given["output_tokens"],
        batch_size=given["batch_size"],
        units=_units(
            dtype or shape.dtype, given["compute_dtype"], given["backend"] if here else None
        ),
        dtype=dtype,
        kv_head_bytes=kv_head_bytes,
        mfu=given["mfu"],
        mbu=given["mbu"],
        price_per_hour=given["price_per_hour"],
    )


def _units(dtype: str, compute_dtype: str | None, backend: str | None) -> Units:
    from twinphase.backends.base import Units
    from twinphase.estimate.datasheets import PRECISIONS
    from twinphase.estimate.inputs import units_for

    if compute_dtype is not None:
        if compute_dtype not in PRECISIONS:
            raise InvalidRequestError(
                f"--compute-dtype is {compute_dtype!r}.", f"Use one of: {', '.join(PRECISIONS)}."
            )
        return Units(compute_dtype, compute_dtype, compute_dtype)
    if backend is None:
        return units_for(dtype)
    from twinphase.backends.device import open_device

    units = open_device(backend).units({(dtype.upper().replace("FP", "F"), 2)})
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as datasheets have them
    return Units(*(names.get(unit, unit) for unit in (units.linear, units.scores, units.values)))
