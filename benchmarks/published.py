"""Published serving tables, computed again from datasheets; their errors make the bands.

python benchmarks/published.py           # prints each row: published, simulated
python benchmarks/published.py --keep    # and stores the errors in the package

Nothing is fitted to these tables except the MBU of GPUs, which comes from the first row of the H100
table: its TPOT is therefore left out. Where a table has no ITL, its median TPOT is taken. A table
that has only mean lengths is simulated with random lengths of those means.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from twinphase import (
    Deployment,
    Distribution,
    Machine,
    Paced,
    Trial,
    open_load,
    read_trials,
    run_requests,
    write_trials,
)
from twinphase.phases.statistics import percentile
from twinphase.simulate.errors import FIGURES, NAMES

SOURCE = "datasheet"


@dataclass(frozen=True)
class Table:
    """A table of a server whose hardware, model and load were published.

    Attributes:
        prompt, output: lengths in tokens.
        rows: figures in milliseconds by the number of requests at once; with `is_open`, by requests
            per second.
    """

    title: str
    model: str
    machine: Machine
    prompt: str
    output: str
    rows: Mapping[int, Mapping[str, float]]
    is_open: bool = False


TABLES = (
    Table(
        "Mistral-7B on an RTX 4090 (mushfiqrahman.dev)",
        "mistral-7b",
        Machine("rtx-4090"),
        "256",
        "72-128",
        {
            4: {"ttft_p50": 53, "ttft_p99": 157},
            8: {"ttft_p50": 55, "ttft_p99": 268},
            16: {"ttft_p50": 97, "ttft_p99": 503},
            32: {"ttft_p50": 277, "ttft_p99": 938},
            48: {"ttft_p50": 840, "ttft_p99": 1483},
        },
    ),
    Table(
        "Llama-3.1-8B on an H100 (yobitelcomm.github.io)",
        "llama-3.1-8b",
        Machine("h100-sxm"),
        "256",
        "128",
        {
            1: {"ttft_p50": 13.98, "ttft_p99": 14.95},
            4: {"ttft_p50": 22.75, "ttft_p99": 32.18, "itl_p50": 6.59},
            16: {"ttft_p50": 41.69, "ttft_p99": 64.71, "itl_p50": 10.94},
            64: {"ttft_p50": 86.92, "ttft_p99": 464.7, "itl_p50": 46.91},
        },
    ),
    # The mean lengths follow from its tokens and requests per second.
    Table(
        "Llama-3.3-70B on four A100 with ShareGPT (gist of surajssd)",
        "llama-3.1-70b",
        Machine("a100-80gb-pcie", devices=4),
        "lognormal:213:1.0",
        "lognormal:214:0.8",
        {
            1: {"ttft_p50": 128.388, "ttft_p99": 376.548, "itl_p50": 43.878, "itl_p99": 131.941},
            4: {"ttft_p50": 219.599, "ttft_p99": 606.801, "itl_p50": 55.5315},
        },
        is_open=True,
    ),
)


def simulated(table: Table, load: int, number: int, seed: int) -> dict[str, float]:
    """The figures of a row with that number of requests, in seconds."""
    spec = Deployment(table.model, table.machine).fleet(seed, ledgers=False)
    offsets = Paced(load, seed).offsets([None] * number) if table.is_open else [0.0] * number
    requests = open_load(
        offsets,
        Distribution.parse(table.prompt),
        Distribution.parse(table.output),
        max_tokens=spec.workers[0].config.max_model_len or 1 << 15,
        seed=seed,
    )
    done = run_requests(spec, requests, concurrency=None if table.is_open else load)
    values = {
        "ttft": [one.ttft for one in done.observations if one.ttft is not None],
        "itl": [gap for one in done.observations for gap in one.itl],
    }
    return {f"{name}_p{at}": percentile(values[name], at) for name in values for at in (50, 99)}


def trial_of(table: Table, load: int, seed: int) -> Trial:
    number = max(100, 8 * load)
    return Trial(
        table.machine.hardware.name,
        table.model,
        time.strftime("%Y-%m-%d"),
        configuration=table.title,
        trace=f"{load} requests per second" if table.is_open else f"{load} at once",
        requests=number,
        utilisation=0.0,
        real={figure: value / 1e3 for figure, value in table.rows[load].items()},
        simulated=simulated(table, load, number, seed),
        source=SOURCE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="store the errors in the package")
    args = parser.parse_args()
    console = Console()
    found = [trial_of(table, load, args.seed) for table in TABLES for load in table.rows]
    for one in found:
        cells = [
            f"{NAMES[figure]} {1e3 * one.real[figure]:,.4g}, {1e3 * one.simulated[figure]:,.4g} "
            f"({one.error(figure):+.0%})"
            for figure in FIGURES
            if figure in one.real
        ]
        line = f"{one.configuration}, {one.trace}, ms: {'; '.join(cells)}"
        console.print(line, soft_wrap=True, markup=False)
    if args.keep:
        write_trials([*(one for one in read_trials() if one.source != SOURCE), *found])


if __name__ == "__main__":
    main()
