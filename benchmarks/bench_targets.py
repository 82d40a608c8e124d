"""Both phases of several targets side by side: what `twinphase bench` measures of one, interleaved over all of them.

    python benchmarks/bench_targets.py http://127.0.0.1:8000 transformers:FOLDER ... [--rounds 5] [--out FOLDER]

For: a table of prefill and decode for engines that a user would choose between on this machine. Servers are to be up;
`name=TARGET` gives one a shorter name. Each round measures every target at every point, in an order drawn anew.
Not for: one engine's curves (`twinphase bench`), nor engines stepped inside their own process (`versus_peers.py`).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twinphase.arguments import is_model_name
from twinphase.bench.conditions import conditions
from twinphase.bench.progress import live
from twinphase.bench.report.plots import bars
from twinphase.bench.report.render import write_report
from twinphase.bench.report.report import Column, Metric, Report, Section, Status, Table, Verdict
from twinphase.bench.statistics import median_interval, percentile
from twinphase.bench.sweep.run import Place
from twinphase.bench.targets.kinds import TargetOptions, kind_of, open_target
from twinphase.bench.targets.target import DecodeSample, PrefillSample, Target
from twinphase.errors import TwinphaseError

RESULTS = Path(__file__).resolve().parent / "results" / "targets"
REST_SECONDS = 0.5  # before each measurement: threads of the engine measured before go to sleep


@dataclass
class Measured:
    """A target, and what was measured of it: tokens a second of each repetition by place, or why there is none."""

    name: str
    target: Target
    rates: dict[Place, list[float]] = field(default_factory=dict)
    counted: dict[Place, float] = field(default_factory=dict)  # prompt tokens, or position, by the target's own count
    failures: dict[Place, str] = field(default_factory=dict)

    def measure(self, place: Place, decode_tokens: int) -> None:
        """One repetition."""
        if place in self.failures:
            return
        try:
            sample: PrefillSample | DecodeSample
            if place.phase == "prefill":
                sample = self.target.prefill(place.length)
                rate, self.counted[place] = sample.num_tokens / sample.seconds, sample.num_tokens
            else:
                sample = self.target.decode(place.length, place.batch, decode_tokens)
                rate, self.counted[place] = place.batch / percentile(sample.gaps, 50), sample.position
        except TwinphaseError as error:
            self.failures[place] = str(error)
            return
        self.rates.setdefault(place, []).append(rate)

    def cell(self, place: Place) -> str:
        """Median ± half of its interval."""
        rates = self.rates.get(place)
        if place in self.failures or not rates:
            return "unknown"
        interval = median_interval(rates)
        middle, half = percentile(rates, 50), (interval.high - interval.low) / 2
        return f"{middle:,.{0 if middle >= 100 else 1}f} ±{half:,.{0 if middle >= 100 else 1}f}"


def parse(text: str) -> tuple[str, str]:
    """(shown name, TARGET) of "name=TARGET" or "TARGET"."""
    name, found, target = text.partition("=")
    return (name, target) if found and "/" not in name and ":" not in name else (text, text)


def column(place: Place) -> Column:
    """Head and definition of a place's column."""
    if place.phase == "prefill":
        return Column(
            f"prefill {place.length:,}", "prompt tokens / seconds of the prefill, tokens/s; see below what is timed"
        )
    batch = f" x{place.batch}" if place.batch > 1 else ""
    what = f"tokens/s of {place.batch} requests together" if batch else "tokens/s of one request"
    return Column(f"decode {place.length:,}{batch}", f"1 / median seconds a token, times the batch: {what}")


def report(found: Sequence[Measured], places: Sequence[Place], rounds: int, seconds: float) -> Report:
    """Table, ratios and definitions."""
    first, others = found[0], found[1:]
    verdicts, plots = [], []
    for phase in ("prefill", "decode"):
        ratios = [
            percentile(first.rates[place], 50)
            / max(percentile(one.rates[place], 50) for one in others if place in one.rates)
            for place in places
            if place.phase == phase and place in first.rates and any(place in one.rates for one in others)
        ]
        if ratios:
            text = f"{phase}: {first.name} / fastest of the others is {min(ratios):.2f} to {max(ratios):.2f}."
            verdicts.append(Verdict(Status.INFO, text))
        rows = [
            {"target": one.name, "point": column(place).name, "tokens/s": percentile(one.rates[place], 50)}
            for one in found
            for place in places
            if place.phase == phase and place in one.rates
        ]
        if rows:
            title = f"{phase.capitalize()}, tokens/s"
            plots.append(bars(phase, title, rows, ("point", ""), ("tokens/s", "tokens/s"), part="target", grouped=True))
    columns = (
        Column("target"),
        Column("precision", "of weights, and KV cache where the target says"),
        *map(column, places),
    )
    rows = tuple((one.name, one.target.facts.precision, *(one.cell(place) for place in places)) for one in found)
    timed = tuple((one.name, one.target.facts.engine, one.target.facts.prefill_definition,
                   one.target.facts.decode_definition) for one in found)  # fmt: skip
    what = Table("What is timed", (Column("target"), Column("engine"), Column("prefill"), Column("decode")), timed)
    failed = tuple((one.name, str(place), reason) for one in found for place, reason in one.failures.items())
    tables = [Table(f"Both phases, medians of {rounds} rounds ± half of the interval", columns, rows), what]
    if failed:
        tables.append(Table("What could not be measured", (Column("target"), Column("point"), Column("why")), failed))
    metrics = tuple(
        Metric(f"{one.name} {place.phase}[n={place.length},batch={place.batch}]", "tok/s", "higher", tuple(rates))
        for one in found
        for place, rates in one.rates.items()
    )
    raw = {one.name: {str(place): rates for place, rates in one.rates.items()} for one in found}
    counted = {one.name: {str(place): count for place, count in one.counted.items()} for one in found}
    facts = conditions(flags={"rounds": rounds, "seconds": round(seconds)})
    section = Section("Both phases", tables=tuple(tables), plots=tuple(plots))
    noise = ("All targets were up at once and measured in turn, in an order drawn anew for each round; one that spins "
             "while idle would slow the others.",)  # fmt: skip
    data = {"rates": raw, "counted": counted, "failures": [list(row) for row in failed]}
    return Report(
        "bench", f"{len(found)} targets side by side", tuple(verdicts), facts, noise, (section,), metrics, data
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="as of `twinphase bench`, or NAME=TARGET")
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--decode", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--batch", type=int, default=4, help="decode of so many at once, behind 256 tokens; 0: none")
    parser.add_argument("--decode-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of targets in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    places = [Place("prefill", n) for n in args.prefill] + [Place("decode", n) for n in args.decode]
    places += [Place("decode", 256, args.batch)] if args.batch else []
    found = []
    for index, text in enumerate(args.targets):
        name, target = parse(text)
        kind = kind_of(target, is_model_name)
        engine = {"threads": args.threads} if args.threads and kind != "url" else {}
        found.append(Measured(name, open_target(target, kind, TargetOptions(engine=engine, seed=args.seed + index))))
    order = random.Random(args.seed)
    total, done, start = (args.rounds + 1) * len(places) * len(found), 0, time.perf_counter()
    with live("targets") as progress:
        for number in range(-1, args.rounds):  # the first round warms up
            work = [(one, place) for one in found for place in places]
            order.shuffle(work)
            for one, place in work:
                progress(f"{one.name}: {place}", done, total)
                time.sleep(REST_SECONDS)
                one.measure(place, args.decode_tokens)
                done += 1
            if number < 0:
                for one in found:
                    one.rates.clear()
    result = report(found, places, args.rounds, time.perf_counter() - start)
    written = write_report(result, args.out)
    print(written.markdown.read_text())
    print(f"report: {written.html}")
    for one in found:
        one.target.close()


if __name__ == "__main__":
    main()
