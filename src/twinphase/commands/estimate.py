"""`twinphase estimate`: the arithmetic of both phases for a model, a machine and a request.

It does not load or run the model.
"""

from __future__ import annotations

from typing import Any

import typer

from twinphase.arguments import JSON, Options, with_options
from twinphase.errors import InvalidRequestError
from twinphase.estimate.options import EstimateOptions


@with_options(given=Options(EstimateOptions))
def estimate(
    name: str = typer.Argument(
        None,
        metavar="MODEL",
        help="A known name, a config.json or its folder, a .gguf file, or a model in the cache.",
    ),
    model: str = typer.Option(None, help="The same as MODEL, given as an option."),
    explain: bool = typer.Option(False, "--explain", help="Print each formula with its numbers."),
    json: bool = JSON,
    list_hardware: bool = typer.Option(
        False, "--list-hardware", help="List the datasheets, each figure with its source."
    ),
    list_models: bool = typer.Option(False, "--list-models", help="List the models known by name."),
    *,
    given: dict[str, Any],
) -> None:
    """Estimate both phases from first principles: TTFT, decode rate, memory, batch sizes, cost."""
    options = EstimateOptions(**given)
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
    machine = hardware_of(options)
    result = compute(shape, machine, scenario_of(shape, options), drafting_of(options, machine))
    if json:
        print_json(view.estimate_json(result))
    else:
        view.show_estimate(result, explain)
