"""`twinphase status`: the engines behind a server, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from twinphase.arguments import API_KEY, JSON, URL
from twinphase.errors import TwinphaseError

COLUMNS = (
    "id",
    "role",
    "host",
    "pid",
    "state",
    "running",
    "waiting",
    "prefill",
    "decode",
    "KV cache",
    "pace",
    "chunk",
    "blocks",
    "transfers",
    "sent",
    "restarts",
)
NUM_TEXT_COLUMNS = 5
COUNTS = ("cached_blocks", "transfers", "blocks_sent", "restarts")


def status(
    server: str = typer.Argument(None, metavar="URL", help="The same as --url."),
    url: str = URL,
    api_key: str = API_KEY,
    json: bool = JSON,
) -> None:
    """Show a server's engines: where they run, their load, and the time share of each phase."""
    from twinphase.commands.explain_source import CHECK_URL, get_json, server_base
    from twinphase.terminal import print_json

    url = server_base(server or url)
    found = get_json(f"{url}/v1/cluster", api_key)
    if json:
        print_json(found)
        return
    workers = found.get("workers")
    if not isinstance(workers, list) or not all(isinstance(one, Mapping) for one in workers):
        raise TwinphaseError(f"The server at {url} has no list of workers.", CHECK_URL)
    print("\n".join([*table([COLUMNS, *map(_row, workers)]), "", *map(ceilings, workers)]))


def ceilings(worker: Mapping[str, Any]) -> str:
    """A line with a worker's measured ceilings, and those that are unknown."""
    known = worker.get("ceilings")
    if not isinstance(known, Mapping):
        return f"{worker.get('id')}: ceilings are not measured yet"
    units = {"read_bandwidth": (1e9, "GB/s"), "int8_ops": (1e12, "TOPS int8")}
    units |= {f"{kind}_flops": (1e12, f"TFLOPS {kind}") for kind in ("float32", "bfloat16")}
    rates = [
        f"{known[name] / scale:.3g} {unit}"
        for name, (scale, unit) in units.items()
        if isinstance(known.get(name), (int, float))
    ]
    return f"{worker.get('id')}: ceilings {', '.join(rates)}"


def _row(worker: Mapping[str, Any]) -> Sequence[str]:
    def percent(name: str) -> str:
        return f"{100 * float(worker.get(name) or 0):.0f} %"

    def known(value: Any, unit: str = "") -> str:
        return "-" if value is None else f"{value}{unit}"

    pace = worker.get("itl_slo_seconds")

    words = [
        known(worker.get(name))
        for name in ("id", "role", "host", "pid", "state", "running", "waiting")
    ]
    limits = [
        known(None if pace is None else round(1e3 * pace), " ms"),
        known(worker.get("chunk_tokens")),
    ]
    shares = [percent(name) for name in ("prefill_share", "decode_share", "kv_cache_usage")]
    return [*words, *shares, *limits, *(known(worker.get(name)) for name in COUNTS)]


def table(rows: Sequence[Sequence[str]], num_text_columns: int = NUM_TEXT_COLUMNS) -> Iterator[str]:
    """Lines of columns of equal width; columns after the first `num_text_columns` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
