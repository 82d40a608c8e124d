"""Prints an estimate: both phases side by side in a table, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from twinphase.estimate.datasheets import DATASHEETS
from twinphase.estimate.estimate import (
    Estimate,
    PartEstimate,
    PhaseEstimate,
    SpeculationEstimate,
    assumptions,
    warnings,
)
from twinphase.estimate.known_models import KNOWN_MODELS, read_shape
from twinphase.estimate.shapes import DecoderShape
from twinphase.terminal import answers, print_json

STYLES = {"compute": "yellow", "memory": "cyan", "unknown": "dim"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def scaled(value: float | None, unit: str) -> str:
    """The value with four digits and a decimal prefix."""
    if value is None:
        return "unknown"
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if value >= size), (1.0, ""))
    return f"{value / size:.4g} {prefix}{unit}"


def time_text(seconds: float | None) -> str:
    """The time with three digits, in s, ms or µs."""
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.4g}{unit}"


def _rate(tokens: float, seconds: float | None) -> str:
    return _number(tokens / seconds if seconds else None, " tok/s")


def _requests(number: int) -> str:
    return f"{number:,} request{'' if number == 1 else 's'}"


def _part_time(part: PartEstimate) -> Text:
    if part.bound == "unknown":
        known = part.memory_seconds
        return Text(
            "unknown" + (f"; memory alone {time_text(known)}" if known is not None else ""),
            STYLES["unknown"],
        )
    compute_bound = part.bound == "compute"
    other = (
        f"memory {time_text(part.memory_seconds)}"
        if compute_bound
        else f"compute {time_text(part.compute_seconds)}"
    )
    return Text(f"{time_text(part.seconds)}, {part.bound}-bound ({other})", STYLES[part.bound])


def _phase_time(phase: PhaseEstimate) -> Text:
    if phase.seconds is not None:
        return Text(time_text(phase.seconds), "bold")
    known = phase.memory_seconds
    return Text(
        "unknown" if known is None else f"unknown; at least {time_text(known)} by memory alone",
        "dim",
    )


def _model_line(result: Estimate) -> str:
    shape = result.shape
    b = result.shape.blueprint
    active = f", {shape.active_parameters / 1e9:.3g} B active" if b.experts else ""
    kv_heads = f"{b.num_kv_heads} KV heads of {b.head_dim}"
    if b.full_kv:
        kv_heads += f" ({b.full_kv.num_heads} of {b.full_kv.head_dim} in full layers)"
    return (
        f"{shape.name}: {shape.total_parameters / 1e9:.4g} B parameters{active}, {b.num_layers} "
        "layers, "
        f"{b.num_heads} heads, {kv_heads}; "
        f"{result.scenario.dtype or shape.dtype}, {scaled(result.weights.total, 'B')}"
    )


def _hardware_line(result: Estimate) -> str:
    hardware = result.hardware
    peaks = ", ".join(
        f"{scaled(hardware.peak(unit), 'FLOP/s')} {unit}" for unit in result.scenario.precisions
    )
    bandwidth = scaled(hardware.read_bandwidth(result.decode.bytes), "B/s")
    many = f"{hardware.devices} x " if hardware.devices > 1 else ""
    return (
        f"{many}{hardware.name}: {peaks}, {bandwidth}, {scaled(hardware.capacity, 'B')}  "
        f"({hardware.kind})"
    )


def show_estimate(result: Estimate, explain: bool) -> None:
    """Print both phases, consequences, warnings and assumptions; with `explain`, formulas too."""
    console = answers()
    console.print(Text(_model_line(result), "bold"))
    console.print(Text(f"  from {result.shape.source}", "dim"))
    console.print(Text(_hardware_line(result)))
    console.print(_phase_table(result))
    console.print(grid(_consequences(result)))
    console.print()
    print_notes(warnings(result), assumptions(result))
    if explain:
        console.print()
        console.print(grid(_formulas(result)))
    else:
        print_notes([], ["--explain prints the formulas with their numbers."])


def print_notes(warned: Iterable[str], assumed: Iterable[str]) -> None:
    """Print the notes below the numbers: warnings, then assumptions."""
    for line in warned:
        answers().print(Text(f"! {line}", "bold yellow"))
    for line in assumed:
        answers().print(Text(f"- {line}", "dim"))


def _phase_table(result: Estimate) -> Table:
    scenario = result.scenario
    prefill = result.prefill
    decode = result.decode
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column(f"prefill\n{scenario.prompt_tokens:,} tokens of one prompt", overflow="fold")
    steps = max(result.decode_steps, 1)
    table.add_column(
        f"decode\na step of batch {scenario.batch_size:,}, mean of {steps:,}", overflow="fold"
    )
    for title, parts in (
        ("linear layers", (prefill.linear, decode.linear)),
        ("attention", (prefill.attention, decode.attention)),
    ):
        table.add_row(f"{title} FLOP", *(scaled(part.flops, "FLOP") for part in parts))
        table.add_row("  bytes", *(scaled(part.bytes, "B") for part in parts))
        table.add_row("  FLOP per byte", *(_number(part.intensity) for part in parts))
        table.add_row("  time", *map(_part_time, parts), end_section=title == "attention")
    table.add_row("time", _phase_time(prefill), _phase_time(decode))
    table.add_row("  is", "TTFT without a queue", "time per output token (TPOT)")
    table.add_row("rate", _rate(scenario.prompt_tokens, prefill.seconds), _decode_rate(result))
    share = result.prefill_share
    shares = (
        ("unknown", "unknown")
        if share is None
        else (f"{100 * share:.1f} %", f"{100 * (1 - share):.1f} %")
    )
    table.add_row("share of a request", *shares)
    if scenario.price_per_hour is not None:
        costs = (result.prefill_cost, result.decode_cost)
        table.add_row(
            "price per 1 M tokens",
            *("unknown" if cost is None else f"{cost:.3g}" for cost in costs),
        )
    return table


def _decode_rate(result: Estimate) -> str:
    batch = result.scenario.batch_size
    seconds = result.decode.seconds
    if seconds is None:  # Memory alone still bounds the rate.
        most = result.decode.memory_seconds
        return "unknown" if most is None else f"unknown; at most {_rate(1, most)} per request"
    total = f", {_rate(batch, seconds)} in all" if batch > 1 else ""
    return f"{_rate(1, seconds)} per request{total}"


def _consequences(result: Estimate) -> Iterator[tuple[str, str]]:
    scenario = result.scenario
    n = result.scenario.prompt_tokens
    last = n + max(result.decode_steps, 1) - 1
    first_rate = _rate(1, result.decode_first.seconds)
    last_rate = _rate(1, result.decode_last.seconds)
    yield "decode by position", f"{first_rate} at {n:,}, {last_rate} at {last:,}"
    token = scaled(result.kv_token_bytes, "B")
    request = scaled(result.sequence_bytes, "B")
    read = ""
    if any(result.shape.blueprint.windows):
        last_step = scaled(result.decode_last.attention.bytes / scenario.batch_size, "B")
        read = f" held; its last step reads {last_step}"
    yield "KV cache", f"{token} per token, {request} per request{read}"
    if result.state_bytes:
        state = scaled(result.state_bytes, "B")
        yield "states", f"{state} per slot; a request has two, which its {request} include"
    most = result.max_batch
    length = n + scenario.output_tokens
    fits = (
        "unknown: give --memory"
        if most is None
        else f"{_requests(most)} of {length:,} tokens beside the weights"
    )
    yield "largest batch", fits
    balance = "unknown" if result.balance is None else f"{result.balance:,.1f} FLOP per byte"
    yield "balance point", f"{balance} ({scenario.units.linear})"
    even = result.break_even_batch
    if even is None:
        yield "break-even batch", result.no_break_even
    else:
        short = most is not None and 0 < most < even
        beyond = f", but only {most:,} fit{'s' if most == 1 else ''}" if short else ""
        yield (
            "break-even batch",
            f"decode's linear layers are compute-bound from {_requests(even)} on{beyond}",
        )
    if result.speculation is not None:
        yield "speculation", _speculation(result, result.speculation)


def _speculation(result: Estimate, with_drafts: SpeculationEstimate) -> str:
    drafting = with_drafts.drafting
    rate = with_drafts.tokens_per_second
    plain = result.decode.seconds
    drafts = (
        f"{drafting.num_tokens} draft{'s' if drafting.num_tokens > 1 else ''}, acceptance "
        f"{drafting.acceptance:g}"
    )
    step = f"{drafting.tokens_per_step:.2f} tokens per step of {time_text(with_drafts.seconds)}"
    if rate is None or plain is None:
        return f"{drafts}: {step}"
    writing = f" ({time_text(drafting.seconds)} of it for drafting)" if drafting.seconds else ""
    return (
        f"{drafts}: {step}{writing}, {_number(rate, ' tok/s')} per request, "
        f"{rate * plain:.2f} times as fast"
    )


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    """A table with rows of a name and a value."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def _formulas(result: Estimate) -> Iterator[tuple[str, str]]:
    """Each formula with the numbers of this estimate."""
    b = result.shape.blueprint
    scenario = result.scenario
    prefill = result.prefill
    decode = result.decode
    n = scenario.prompt_tokens
    batch = scenario.batch_size
    layers = b.num_kv_layers
    p = result.shape.linear_parameters
    head = result.shape.parameters.head
    peak = scaled(result.hardware.peak(scenario.units.linear), "FLOP/s")
    bandwidth = scaled(result.hardware.read_bandwidth(decode.bytes), "B/s")
    yield (
        "P",
        f"{p:,} weights of the layers that one token uses; V h = {head:,} weights of the output "
        "head",
    )
    formula = f"2 P n + 2 V h = 2 x {p:,} x {n:,} + 2 x {head:,}"
    if b.shared_kv_layers:
        tail = result.shape.parameters.tail
        yield "", f"T = {tail:,} of P are after the last layer that writes KV"
        formula = "2 (P - T) n + 2 (T + V h)"
    yield "linear FLOP", f"prefill {formula} = {prefill.linear.flops:,}"
    yield "", f"decode  2 (P + V h) B = 2 x {p + head:,} x {batch:,} = {decode.linear.flops:,}"
    attention = (
        f"4 H d L n (n + 1) / 2 = 4 x {b.num_heads} x {b.head_dim} x {layers} x {n:,} x "
        f"{n + 1:,} / 2"
    )
    if any(window is not None for window in b.windows):
        attention = "4 H d min(p + 1, window), summed over rows and layers"
    yield "attention FLOP", f"prefill {attention} = {prefill.attention.flops:,}"
    yield "", f"decode  4 H d per layer and token attended to = {decode.attention.flops:,.0f}"
    experts = " + experts reached" if b.experts else ""
    yield (
        "linear bytes",
        f"layers{experts} + head, once per step = {decode.linear.bytes:,.0f} (decode)",
    )
    count = b.kv_bytes(lambda dim: 1)
    each = count * scenario.kv_head_bytes
    heads = f"{count}" if b.full_kv else f"{layers} x {b.num_kv_heads}"
    key_value = f"{heads} x {scenario.kv_head_bytes:g} = {each:,.0f}"
    yield "KV bytes", f"per token L H_kv x bytes of one head's key and value = {key_value}"
    yield "", f"decode reads those of every token attended to = {decode.attention.bytes:,.0f}"
    yield "FLOP per byte", "FLOP / bytes"
    ceilings = f"max(FLOP / ({scenario.mfu:g} x {peak}), bytes / ({scenario.mbu:g} x {bandwidth}))"
    yield "time", f"{ceilings}, linear layers + attention"
    steps = f"{result.decode_steps:,} decode steps"
    yield "share", f"prefill / (prefill + {steps}); the first output token comes out of prefill"
    yield "largest batch", "floor((memory - weights) / KV of a request at its end)"
    yield (
        "break-even",
        "smallest B with 2 (P + V h) B / (MFU peak) >= linear bytes / (MBU bandwidth)",
    )
    yield "balance point", "peak / bandwidth"
    if scenario.price_per_hour is not None:
        yield (
            "price per 1 M",
            "price per hour / 3600 x 1,000,000 x prefill / n, or x decode step / B",
        )


def _with_properties(one: Any, *names: str) -> dict[str, Any]:
    return asdict(one) | {name: getattr(one, name) for name in names}


def _phase_json(phase: PhaseEstimate) -> dict[str, Any]:
    parts = {"linear": phase.linear, "attention": phase.attention}
    found = {
        name: _with_properties(part, "intensity", "seconds", "bound")
        for name, part in parts.items()
    }
    return _with_properties(phase, "flops", "bytes", "seconds", "memory_seconds", "bound") | found


def shape_json(shape: DecoderShape) -> dict[str, Any]:
    """A model's sizes, without RoPE's frequencies."""
    described = {name: value for name, value in asdict(shape.blueprint).items() if name != "ropes"}
    given = {name: getattr(shape, name) for name in ("name", "source", "dtype")}
    counts = ("linear_parameters", "total_parameters", "active_parameters")
    parameters = asdict(shape.parameters)
    return (
        given
        | described
        | {name: getattr(shape, name) for name in counts}
        | {"parameters": parameters}
    )


def estimate_json(result: Estimate) -> dict[str, Any]:
    """All results as JSON; None is unknown."""
    hardware = result.hardware
    scenario = result.scenario
    decode = result.decode.seconds
    prefill = result.prefill.seconds
    return {
        "model": shape_json(result.shape)
        | {"weight_bytes": _with_properties(result.weights, "total")},
        "hardware": {
            **{name: getattr(hardware, name) for name in ("name", "kind", "devices")},
            "peaks": {unit: hardware.peak(unit) for unit in scenario.precisions},
            "bandwidth": hardware.read_bandwidth(result.decode.bytes),
            "memory": hardware.capacity,
        },
        "scenario": asdict(scenario),
        **{
            name: _phase_json(getattr(result, name))
            for name in ("prefill", "decode", "decode_first", "decode_last")
        },
        "decode_steps": result.decode_steps,
        "ttft_seconds": prefill,
        "prefill_tokens_per_second": scenario.prompt_tokens / prefill if prefill else None,
        "decode_tokens_per_second": 1 / decode if decode else None,
        "decode_tokens_per_second_of_all": scenario.batch_size / decode if decode else None,
        "prefill_share": result.prefill_share,
        "kv_bytes_per_token": result.kv_token_bytes,
        "kv_bytes_per_request": result.sequence_bytes,
        "state_bytes": result.state_bytes,
        "kv_bytes_read_by_last_step": result.decode_last.attention.bytes,
        "largest_batch": result.max_batch,
        "balance_flops_per_byte": result.balance,
        "break_even_batch": result.break_even_batch,
        "no_break_even": result.no_break_even,
        "price_per_million_prompt_tokens": result.prefill_cost,
        "price_per_million_output_tokens": result.decode_cost,
        "speculation": result.speculation
        and asdict(result.speculation.drafting)
        | {
            "tokens_per_step": result.speculation.drafting.tokens_per_step,
            "step": _phase_json(result.speculation.step),
            "step_seconds": result.speculation.seconds,
            "tokens_per_second": result.speculation.tokens_per_second,
        },
        "warnings": list(warnings(result)),
        "assumptions": list(assumptions(result)),
    }


def show_hardware(as_json: bool) -> None:
    """Print every datasheet with its figures and the documents that state them."""
    if as_json:
        print_json([asdict(sheet) for sheet in DATASHEETS.values()])
        return
    console = answers()
    table = Table(
        "name",
        "product",
        "bandwidth",
        "memory",
        "peak FLOP/s, dense",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for sheet in DATASHEETS.values():
        rates = (f"{precision} {scaled(peak, '')}" for precision, peak in sheet.peaks.items())
        # No-break spaces keep each figure on one line.
        peaks = ", ".join(rate.replace(" ", "\u00a0") for rate in rates) or "unknown"
        table.add_row(
            sheet.name,
            sheet.title,
            scaled(sheet.bandwidth, "B/s"),
            scaled(sheet.memory, "B"),
            peaks,
        )
    console.print(table)
    for sheet in DATASHEETS.values():
        console.print(Text(sheet.name, "bold"))
        for source in sheet.sources:
            console.print(Text(f"  {', '.join(source.figures)}: {source.title}"))
            # The address is not wrapped, so that it can be copied.
            console.print(Text(f"    {source.address}", "dim"), soft_wrap=True)
        for figure, formula in sheet.computed.items():
            console.print(Text(f"  {figure} is computed: {formula}"))
        if sheet.note:
            console.print(Text(f"  {sheet.note}", "dim"))


def show_models(as_json: bool) -> None:
    """Every model known by name, and the repository that publishes its shape."""
    shapes = [read_shape(name) for name in KNOWN_MODELS]
    if as_json:
        print_json([shape_json(shape) for shape in shapes])
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "parameters", "active", "context"):
        table.add_column(head, no_wrap=True)
    # The name is not truncated, so that it can be copied.
    table.add_column("repository", overflow="fold")
    for shape in shapes:
        active = f"{shape.active_parameters:,}" if shape.blueprint.experts else ""
        context = f"{shape.blueprint.context_length:,}"
        table.add_row(
            shape.name,
            f"{shape.total_parameters:,}",
            active,
            context,
            KNOWN_MODELS[shape.name].repo,
        )
    answers().print(table)
    answers().print(
        Text("Shapes are those of each repository's config.json on https://huggingface.co.", "dim")
    )
