"""Predicts latencies of a step log's requests under other options: `replay --with`.

A simulation repeats the logged requests with their arrival times and token counts, and learns its
step times from the log itself. It runs once with the logged options and once with the changed ones,
so that the report can show the error of the simulation beside the prediction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from twinphase.cluster.routing import Routing
from twinphase.config import EngineConfig
from twinphase.engine.trace import Replaying, replay
from twinphase.errors import InvalidRequestError
from twinphase.phases import latency
from twinphase.phases.statistics import percentile
from twinphase.simulate.calibration import calibration_of
from twinphase.simulate.simulation import Simulation
from twinphase.simulate.spec import FleetSpec, TraceRequest

MIN_LOGGED_STEPS = 20
# Options that change step times are missing, because a log does not contain those times.
CHANGEABLE = (
    "itl_slo_ms",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "enable_prefix_caching",
    "scheduling_policy",
)
SHOWN_REQUESTS = 20
FIGURES = (("TTFT", 50), ("TTFT", 99), ("ITL", 50), ("ITL", 99))


@dataclass
class Felt:
    """Token times of one request, in seconds on the log's clock."""

    arrival: float
    num_prompt: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return latency.ttft(self.arrival, self.times[0])

    @property
    def longest_gap(self) -> float:
        return max(latency.itl(self.times), default=0.0)


@dataclass(frozen=True)
class WhatIf:
    """The requests by id: logged, simulated with the logged options, and with the changes."""

    changes: Mapping[str, Any]
    logged: Mapping[str, Felt]
    before: Mapping[str, Felt]
    after: Mapping[str, Felt]

    def figure(self, which: Mapping[str, Felt], name: str, q: float) -> float:
        """A percentile over all requests or all gaps, in seconds."""
        seen = which.values()
        if name == "TTFT":
            return percentile([one.ttft for one in seen], q)
        return percentile([gap for one in seen for gap in latency.itl(one.times)], q)

    def lines(self) -> list[str]:
        """Lines for a terminal: the figures, and the requests that change the most."""
        head = f"{'':<10}{'logged':>12}{'simulated':>12}{'with':>12}"
        found = [f"With {words_of(self.changes)}, {len(self.logged)} requests, ms:", head]
        for name, q in FIGURES:
            values = [self.figure(which, name, q) for which in self._all]
            row = "".join(f"{1e3 * value:>12,.1f}" for value in values)
            found.append(f"{f'{name} p{q}':<10}{row}")
        found += ["", f"{'request':<28}{'prompt':>8}{'TTFT':>18}{'longest gap':>20}"]
        for name in self._changed()[:SHOWN_REQUESTS]:
            one = self.before[name]
            other = self.after[name]
            ttft = f"{1e3 * one.ttft:,.0f} -> {1e3 * other.ttft:,.0f}"
            gap = f"{1e3 * one.longest_gap:,.0f} -> {1e3 * other.longest_gap:,.0f}"
            found.append(f"{name[:26]:<28}{one.num_prompt:>8,}{ttft:>18}{gap:>20}")
        return found

    @property
    def _all(self) -> tuple[Mapping[str, Felt], ...]:
        return self.logged, self.before, self.after

    def _changed(self) -> list[str]:
        """Lines about requests, those that change the most first."""

        def change(name: str) -> float:
            one = self.before[name]
            other = self.after[name]
            return abs(other.ttft - one.ttft) + abs(other.longest_gap - one.longest_gap)

        return sorted(self.before, key=change, reverse=True)

    def as_json(self) -> dict[str, Any]:
        kinds = ("logged", "simulated", "with")
        requests = {
            name: {
                kind: {"ttft": which[name].ttft, "token_times": which[name].times}
                for kind, which in zip(kinds, self._all, strict=True)
            }
            for name in self.before
        }
        return {"changes": dict(self.changes), "requests": requests}


def words_of(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def parse_changes(text: str) -> dict[str, Any]:
    """Read "itl_slo_ms=20,max_num_seqs=8".

    Raises:
        InvalidRequestError: an option cannot be changed, or the text has another form.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().replace("-", "_").partition("=")
        if not equals or name not in CHANGEABLE:
            raise InvalidRequestError(
                f"--with {part.strip()!r} cannot be used.",
                f"Give OPTION=VALUE, with commas; options are {', '.join(CHANGEABLE)}.",
            )
        try:
            found[name] = json.loads(value.lower())
        except ValueError:
            found[name] = value
    return found


def what_if(log: Path, changes: Mapping[str, Any]) -> WhatIf:
    """Simulate a log's requests with the logged options and with changed ones.

    Raises:
        InvalidRequestError: the file is not a step log or has too few steps, or a value is not
            allowed.
    """
    logged, prompts, header = _logged(log)
    whole = {name: one for name, one in logged.items() if one.times}
    calibration = calibration_of(log, first=0, least=MIN_LOGGED_STEPS)
    known = {one.name for one in fields(EngineConfig)}
    options = {key: value for key, value in header["config"].items() if key in known}
    options |= {"trace_file": None, "speculative_config": None}
    slo = header["slo_seconds"]
    if options.get("itl_slo_ms") == "auto" and slo:
        options["itl_slo_ms"] = 1e3 * slo

    def simulated(config: EngineConfig) -> dict[str, Felt]:
        names = sorted(whole, key=lambda name: whole[name].arrival)
        trace = [
            TraceRequest(whole[name].arrival, len(whole[name].times), prompts[name].copy)
            for name in names
        ]
        worker = calibration.worker("both", config)
        simulation = Simulation(FleetSpec([worker]), Routing(block_size=config.block_size))
        simulation.run(trace)
        outcomes = zip(names, simulation.outcomes, strict=True)
        return {
            name: Felt(one.arrival, one.num_prompt, list(one.token_times)) for name, one in outcomes
        }

    before = simulated(EngineConfig(**options))
    after = simulated(EngineConfig(**{**options, **changes}))
    return WhatIf(changes, whole, before, after)


def _logged(log: Path) -> tuple[dict[str, Felt], dict[str, list[int]], dict[str, Any]]:
    """Token times and prompt of each request of a log, and the log's header.

    A request counts as arrived at the start of the step after its line, because the log has no
    arrival times; the first step starts at 0.
    """
    found: dict[str, Felt] = {}
    prompts: dict[str, list[int]] = {}
    header: dict[str, Any] = {}
    waiting: list[str] = []
    given: dict[str, int] = {}
    origin: float | None = None

    def watch(event: dict[str, Any], state: Replaying) -> None:
        nonlocal origin, given
        kind = event["event"]
        if kind == "header":
            header.update(event)
        elif kind == "pace":
            header["slo_seconds"] = event["slo_seconds"]
        elif kind == "add":
            waiting.append(event["request_id"])
            prompts[event["request_id"]] = list(event["prompt_token_ids"])
        elif kind == "step":
            given = {name: len(tokens) for name, tokens in event["token_ids"].items()}
        elif kind == "observe":
            origin = event["start"] if origin is None else origin
            start = event["start"] - origin
            for name in waiting:
                found[name] = Felt(start, len(prompts[name]))
            waiting.clear()
            end = start + event["seconds"] + event["drafting"]
            for name, number in given.items():
                if name in found:
                    found[name].times.extend([end] * number)

    replay(log, watch)
    return found, prompts, header
