"""`twinphase estimate`: the arithmetic of both phases for a model, a machine and a request.

Runs nothing.
"""

from __future__ import annotations

import typer

from twinphase.arguments import JSON
from twinphase.errors import InvalidRequestError


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
        "cpu", help="Backend whose measurements `--hardware this` uses: cpu or torch."
    ),
    prompt_tokens: int = typer.Option(
        1000, "--prompt-tokens", "--input-len", help="Prompt tokens per request."
    ),
    output_tokens: int = typer.Option(
        200, "--output-tokens", "--output-len", help="Output tokens per request."
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
        None, help="Memory bandwidth in bytes/s, instead of the datasheet's, e.g. 2.039T."
    ),
    memory: str = typer.Option(None, help="Memory in bytes, instead of the datasheet's, e.g. 80G."),
    devices: int = typer.Option(1, help="Number of devices that share every layer."),
    price_per_hour: float = typer.Option(
        None, help="Price per hour of all devices together; gives the cost per million tokens."
    ),
    speculative_config: str = typer.Option(
        None, help="Speculative decoding, as for `serve`: a method or an object of vLLM's keys."
    ),
    acceptance: float = typer.Option(
        None,
        help="Assumed chance that a drafted token is right where those before it are. [needs "
        "--speculative-config]",
    ),
    explain: bool = typer.Option(False, "--explain", help="Print each formula with its numbers."),
    json: bool = JSON,
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
    from twinphase.commands.estimate_options import drafting_of, hardware_of, scenario_of
    from twinphase.estimate.estimate import estimate as compute
    from twinphase.estimate.known_models import read_shape
    from twinphase.terminal import print_json

    shape = read_shape(model)
    machine = hardware_of(given)
    result = compute(shape, machine, scenario_of(shape, given), drafting_of(given, machine))
    if json:
        print_json(view.estimate_json(result))
    else:
        view.show_estimate(result, explain)
