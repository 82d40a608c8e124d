"""How an estimate is shown: both phases side by side in a table, or as JSON. Computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from twinphase.estimate.datasheets import DATASHEETS
from twinphase.estimate.estimate import Estimate, Part, PhaseEstimate, assumptions, warnings
from twinphase.estimate.known_models import KNOWN_MODELS
from twinphase.estimate.shapes import read_shape
from twinphase.terminal import answers

__all__ = ["print_json", "show_estimate", "show_hardware", "show_models"]

STYLES = {"compute": "yellow", "memory": "cyan", "unknown": "dim"}
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def _scaled(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if value >= size), (1.0, ""))
    return f"{value / size:.4g} {prefix}{unit}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _rate(tokens: float, seconds: float | None) -> str:
    if not seconds:
        return "unknown"
    rate = tokens / seconds
    return f"{rate:,.0f} tok/s" if rate >= 1000 else f"{rate:.4g} tok/s"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _requests(number: int) -> str:
    """So many of them, in words."""
    return f"{number:,} request{'' if number == 1 else 's'}"


def _money(price: float | None) -> str:
    return "unknown" if price is None else f"{price:.3g}"


def _bound(part: Part) -> Text:
    if part.bound == "unknown":
        known = part.memory_seconds
        return Text("unknown" + (f"; memory alone {_time(known)}" if known is not None else ""), STYLES["unknown"])
    other = part.memory_seconds if part.bound == "compute" else part.compute_seconds
    against = "memory" if part.bound == "compute" else "compute"
    return Text(f"{_time(part.seconds)}, {part.bound}-bound ({against} {_time(other)})", STYLES[part.bound])


def _phase_time(phase: PhaseEstimate) -> Text:
    if phase.seconds is not None:
        return Text(_time(phase.seconds), "bold")
    known = phase.memory_seconds
    return Text("unknown" if known is None else f"unknown; at least {_time(known)} by memory alone", "dim")


def _model_line(result: Estimate) -> str:
    shape = result.shape
    active = f", {shape.active_parameters / 1e9:.3g} B active" if shape.num_experts else ""
    heads = f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads of {shape.head_dim}"
    stored = result.scenario.dtype or shape.dtype
    return (
        f"{shape.name}: {shape.total_parameters / 1e9:.4g} B parameters{active}, {shape.num_layers} layers, {heads}; "
        f"{stored}, {_scaled(result.weights.total, 'B')}"
    )


def _hardware_line(result: Estimate) -> str:
    hardware, units = result.hardware, result.scenario.units
    precisions = dict.fromkeys((units.linear, units.scores, units.values))
    peaks = ", ".join(f"{_scaled(hardware.peak(unit), 'FLOP/s')} {unit}" for unit in precisions)
    bandwidth = _scaled(hardware.read_bandwidth(result.decode.bytes), "B/s")
    many = f"{hardware.devices} x " if hardware.devices > 1 else ""
    return f"{many}{hardware.name}: {peaks}, {bandwidth}, {_scaled(hardware.capacity, 'B')}  ({hardware.kind})"


def show_estimate(result: Estimate, explain: bool) -> None:
    """Print both phases side by side, what follows from them, and what to know; formulas too if asked to `explain`."""
    console, scenario = answers(), result.scenario
    console.print(Text(_model_line(result), "bold"))
    console.print(Text(f"  from {result.shape.source}", "dim"))
    console.print(Text(_hardware_line(result)))
    batch = f"a step of batch {scenario.batch_size:,}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column(f"prefill\n{scenario.prompt_tokens:,} tokens of one prompt", overflow="fold")
    table.add_column(f"decode\n{batch}, mean of {max(result.decode_steps, 1):,}", overflow="fold")
    prefill, decode = result.prefill, result.decode
    for name in ("linear", "attention"):
        left, right = getattr(prefill, name), getattr(decode, name)
        title = "linear layers" if name == "linear" else name
        table.add_row(f"{title} FLOP", _scaled(left.flops, "FLOP"), _scaled(right.flops, "FLOP"))
        table.add_row("  bytes", _scaled(left.bytes, "B"), _scaled(right.bytes, "B"))
        table.add_row("  FLOP a byte", _ratio(left.intensity), _ratio(right.intensity))
        table.add_row("  time", _bound(left), _bound(right), end_section=name == "attention")
    table.add_row("time", _phase_time(prefill), _phase_time(decode))
    table.add_row("  is", "TTFT without a queue", "time per output token (TPOT)")
    table.add_row("rate", _rate(scenario.prompt_tokens, prefill.seconds), _decode_rate(result))
    rest = None if result.prefill_share is None else 1 - result.prefill_share
    table.add_row("share of a request", _percent(result.prefill_share), _percent(rest))
    if scenario.price_per_hour is not None:
        table.add_row("price of 1 M tokens", _money(result.prefill_cost), _money(result.decode_cost))
    console.print(table)
    grid = Table.grid(padding=(0, 2))
    for name, value in _consequences(result):
        grid.add_row(name, value)
    console.print(grid)
    console.print()
    for line in warnings(result):
        console.print(Text(f"! {line}", "bold yellow"))
    for line in assumptions(result):
        console.print(Text(f"- {line}", "dim"))
    for line in _formulas(result) if explain else ():
        console.print(Text(line))
    if not explain:
        console.print(Text("- --explain prints the formulas with their numbers.", "dim"))


def _decode_rate(result: Estimate) -> str:
    batch, seconds = result.scenario.batch_size, result.decode.seconds
    if seconds is None:  # memory alone still says what no peak could beat
        most = result.decode.memory_seconds
        return "unknown" if most is None else f"unknown; at most {_rate(1, most)} a request"
    of_all = f", {_rate(batch, seconds)} of all" if batch > 1 else ""
    return f"{_rate(1, seconds)} a request{of_all}"


def _consequences(result: Estimate) -> Iterable[tuple[str, str]]:
    scenario, n = result.scenario, result.scenario.prompt_tokens
    last = n + max(result.decode_steps, 1) - 1
    first_rate, last_rate = _rate(1, result.decode_first.seconds), _rate(1, result.decode_last.seconds)
    yield "decode by position", f"{first_rate} at {n:,}, {last_rate} at {last:,}"
    yield "KV cache", f"{_scaled(result.kv_token_bytes, 'B')} a token, {_scaled(result.sequence_bytes, 'B')} a request"
    length = n + scenario.output_tokens
    if result.max_batch is None:
        yield "largest batch", "unknown: give --memory"
    else:
        yield "largest batch", f"{_requests(result.max_batch)} of {length:,} tokens beside the weights"
    balance = "unknown" if result.balance is None else f"{result.balance:,.1f} FLOP a byte"
    yield "balance point", f"{balance} ({scenario.units.linear})"
    if result.break_even_batch is not None:
        most = result.max_batch
        beyond = (
            f", but only {most:,} fit{'s' if most == 1 else ''}"
            if most is not None and 0 < most < result.break_even_batch
            else ""
        )
        text = f"decode's linear layers are compute-bound from {_requests(result.break_even_batch)} on{beyond}"
        yield "break-even batch", text
    else:
        yield "break-even batch", result.no_break_even


def _formulas(result: Estimate) -> Iterable[str]:
    """Each formula with this estimate's numbers."""
    shape, scenario, prefill, decode = result.shape, result.scenario, result.prefill, result.decode
    n, batch, head = scenario.prompt_tokens, scenario.batch_size, shape.head_parameters
    p, units = shape.linear_parameters, scenario.units
    peak, kv = result.hardware.peak(units.linear), shape.num_kv_heads * scenario.kv_head_bytes
    bandwidth = result.hardware.read_bandwidth(decode.bytes)
    windowed = any(window is not None for window in shape.windows)
    heads = f"4 x {shape.num_heads} x {shape.head_dim}"
    yield ""
    yield f"P = {p:,} weights of the layers, as one token goes through them; V h = {head:,} of the output head"
    yield f"linear FLOP     prefill 2 P n + 2 V h = 2 x {p:,} x {n:,} + 2 x {head:,} = {prefill.linear.flops:,}"
    yield f"                decode  2 (P + V h) B = 2 x {p + head:,} x {batch:,} = {decode.linear.flops:,}"
    if windowed:
        yield f"attention FLOP  prefill 4 H d x min(p + 1, window), rows and layers summed: {prefill.attention.flops:,}"
    else:
        formula = f"{heads} x {shape.num_layers} x {n:,} x {n + 1:,} / 2"
        yield f"attention FLOP  prefill 4 H d L n (n + 1) / 2 = {formula} = {prefill.attention.flops:,}"
    yield f"                decode  4 H d for every layer and token attended to: {decode.attention.flops:,.0f}"
    experts = " + experts reached" if shape.num_experts else ""
    yield f"linear bytes    layers{experts} + head, once a step = {decode.linear.bytes:,.0f} (decode)"
    each = f"{shape.num_layers} x {shape.num_kv_heads} x {scenario.kv_head_bytes:g} = {shape.num_layers * kv:,.0f}"
    yield f"KV bytes        a token L H_kv x bytes of a head's key and value = {each}"
    yield f"                decode reads those of every token attended to: {decode.attention.bytes:,.0f}"
    yield "FLOP a byte     FLOP / bytes"
    yield (
        f"time            max(FLOP / ({scenario.mfu:g} x {_scaled(peak, 'FLOP/s')}), bytes / "
        f"({scenario.mbu:g} x {_scaled(bandwidth, 'B/s')})), linear layers + attention"
    )
    steps = result.decode_steps
    yield f"share           prefill / (prefill + {steps:,} decode steps); the first output token comes out of prefill"
    yield "largest batch   floor((memory - weights) / KV of a request at its end)"
    yield "break-even      smallest B with 2 (P + V h) B / (MFU peak) >= linear bytes / (MBU bandwidth)"
    yield "balance point   peak / bandwidth"
    if scenario.price_per_hour is not None:
        yield "price of 1 M    price an hour / 3600 x 1,000,000 x prefill / n, or x decode step / B"


def _part_json(part: Part) -> dict[str, Any]:
    return asdict(part) | {"intensity": part.intensity, "seconds": part.seconds, "bound": part.bound}


def _phase_json(phase: PhaseEstimate) -> dict[str, Any]:
    return {
        "linear": _part_json(phase.linear),
        "attention": _part_json(phase.attention),
        "flops": phase.flops,
        "bytes": phase.bytes,
        "seconds": phase.seconds,
        "memory_seconds": phase.memory_seconds,
        "bound": phase.bound,
    }


def print_json(result: Estimate) -> None:
    """Everything as one JSON object; null is unknown."""
    shape, hardware, scenario = result.shape, result.hardware, result.scenario
    units = dict.fromkeys((scenario.units.linear, scenario.units.scores, scenario.units.values))
    decode, prefill = result.decode.seconds, result.prefill.seconds
    data = {
        "model": asdict(shape)
        | {
            "linear_parameters": shape.linear_parameters,
            "total_parameters": shape.total_parameters,
            "active_parameters": shape.active_parameters,
            "weight_bytes": asdict(result.weights),
        },
        "hardware": {
            "name": hardware.name,
            "kind": hardware.kind,
            "devices": hardware.devices,
            "peaks": {unit: hardware.peak(unit) for unit in units},
            "bandwidth": hardware.read_bandwidth(result.decode.bytes),
            "memory": hardware.capacity,
        },
        "scenario": asdict(scenario),
        "prefill": _phase_json(result.prefill),
        "decode": _phase_json(result.decode),
        "decode_first": _phase_json(result.decode_first),
        "decode_last": _phase_json(result.decode_last),
        "decode_steps": result.decode_steps,
        "ttft_seconds": result.ttft,
        "prefill_tokens_per_second": scenario.prompt_tokens / prefill if prefill else None,
        "decode_tokens_per_second": 1 / decode if decode else None,
        "decode_tokens_per_second_of_all": scenario.batch_size / decode if decode else None,
        "prefill_share": result.prefill_share,
        "kv_bytes_per_token": result.kv_token_bytes,
        "kv_bytes_per_request": result.sequence_bytes,
        "largest_batch": result.max_batch,
        "balance_flops_per_byte": result.balance,
        "break_even_batch": result.break_even_batch,
        "no_break_even": result.no_break_even,
        "price_per_million_prompt_tokens": result.prefill_cost,
        "price_per_million_output_tokens": result.decode_cost,
        "warnings": warnings(result),
        "assumptions": assumptions(result),
    }
    print(json.dumps(data, indent=1))


def show_hardware(as_json: bool) -> None:
    """Every datasheet, its figures and where they stand."""
    if as_json:
        print(json.dumps([asdict(sheet) for sheet in DATASHEETS.values()], indent=1))
        return
    console = answers()
    table = Table("name", "product", "bandwidth", "memory", "peak FLOP/s, dense", box=SIMPLE_HEAD, pad_edge=False)
    for sheet in DATASHEETS.values():
        rates = (f"{precision} {_scaled(peak, '')}" for precision, peak in sheet.peaks.items())
        peaks = ", ".join(rate.replace(" ", "\u00a0") for rate in rates) or "unknown"  # a figure stays on its line
        table.add_row(sheet.name, sheet.title, _scaled(sheet.bandwidth, "B/s"), _scaled(sheet.memory, "B"), peaks)
    console.print(table)
    for sheet in DATASHEETS.values():
        console.print(Text(sheet.name, "bold"))
        for source in sheet.sources:
            figures = [name for name in source.figures if name in sheet.figures()]
            console.print(Text(f"  {', '.join(figures)}: {source.title}"))
            console.print(Text(f"    {source.address}", "dim"), soft_wrap=True)  # whole, to be copied
        for figure, formula in sheet.computed.items():
            console.print(Text(f"  {figure} is computed: {formula}"))
        if sheet.note:
            console.print(Text(f"  {sheet.note}", "dim"))


def show_models(as_json: bool) -> None:
    """Every model known by name, and where its shape stands."""
    shapes = [read_shape(name) for name in KNOWN_MODELS]
    if as_json:
        print(json.dumps([asdict(shape) for shape in shapes], indent=1))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "parameters", "active", "context"):
        table.add_column(head, no_wrap=True)
    table.add_column("repository", overflow="fold")  # whole, to be copied, on two lines where one is too narrow
    for shape in shapes:
        counts = (f"{shape.total_parameters:,}", f"{shape.active_parameters:,}" if shape.num_experts else "")
        table.add_row(shape.name, *counts, _count(shape.context_length), KNOWN_MODELS[shape.name].repo)
    answers().print(table)
    answers().print(Text("Shapes are those of each repository's config.json on https://huggingface.co.", "dim"))
