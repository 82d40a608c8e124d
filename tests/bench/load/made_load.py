"""Loads without a server: results of given moments, and targets that need no network."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from typing import Any

from bench.stub_server import RunningStub
from twinphase.phases.observation import Observation
from twinphase.workload.distributions import Lengths
from twinphase_bench.client.client import Reply, run
from twinphase_bench.client.health import ClientHealth
from twinphase_bench.load.run import LoadResult
from twinphase_bench.load.workload import Sizing, Workload, make_workload
from twinphase_bench.report.report import Section
from twinphase_bench.targets.openai import OpenAITarget
from twinphase_bench.targets.target import LoadTarget, TargetFacts

FACTS = TargetFacts("made up", "test", "none", "m", "unknown", None, "", "")
LATE = ClientHealth([0.5] * 3, [0.3] * 100, 0.95)  # a client that voids every run


def opened(stub: RunningStub, *scripts: dict[str, Any], **options: Any) -> OpenAITarget:
    """The stub as a target; its next replies are by the scripts."""
    stub.script()
    target = run(OpenAITarget.open(stub.url, **options))
    stub.script(*scripts)
    return target


def requests(number: int, words: int = 10, seed: int = 0) -> Workload:
    return make_workload(
        Lengths((words, words), (8, 8)), number, Sizing(), seed=seed, num_warm_up=0
    )


def made(rows: list[tuple[float, list[float], str]], **more: Any) -> LoadResult:
    """A result of requests as (intended, token times after it, error)."""
    seen = [
        Observation(
            str(i),
            at,
            at,
            [at + t for t in times],
            at + (times[-1] if times else 0.1),
            10,
            0,
            len(times),
            200,
            error,
        )
        for i, (at, times, error) in enumerate(rows)
    ]
    values: dict[str, Any] = {
        "rate": 1.0,
        "concurrency": None,
        "client": ClientHealth([0.0], [0.0]),
        **more,
    }
    return LoadResult(
        FACTS, "work", "arrivals", observations=seen, num_requests=len(seen), **values
    )


def every(seconds: float, number: int, *times: float) -> list[tuple[float, list[float], str]]:
    """Requests at even distances, all of the same latencies."""
    return [(i * seconds, list(times), "") for i in range(number)]


def stream(*events: Any, sent: float = 0.0, moments: Sequence[float] = ()) -> Reply:
    """A reply with events at `moments` or every 10 ms, and [DONE] with the last one."""
    moments = moments or [sent + 0.01 * n for n in range(1, len(events) + 1)]
    pairs = zip(moments, events, strict=True)
    pieces = [(moment, b"data: " + json.dumps(event).encode() + b"\n\n") for moment, event in pairs]
    pieces.append((moments[-1], b"data: [DONE]\n\n"))
    return Reply(sent, sent=sent, ended=moments[-1], status=200, pieces=pieces, whole=True)


def text(found: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": found, "finish_reason": finish}]}


def delta(finish: str | None = None, **found: str) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": found, "finish_reason": finish}]}


def usage(number: int, **details: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": number, **details},
    }


class Instant(LoadTarget):
    """A target that answers at once: whatever is late is the client.

    It notes prompts and if garbage is collected.
    """

    facts = FACTS

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    async def sizing(self) -> Sizing:
        return Sizing()

    async def send(self, prompt: Any, max_tokens: int, intended: float) -> Observation:
        self.asked.append((prompt.text, gc.isenabled()))
        now = time.perf_counter()
        return Observation("", intended, now, [now], time.perf_counter(), 1, 0, 1, 200)

    async def close(self) -> None:
        pass


def check_sections(sections: Sequence[Section]) -> None:
    """Tables have rows, plots have data and unique names, all is JSON."""
    for section in sections:
        for table in section.tables:
            assert table.rows
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
        names = [plot.name for plot in section.plots]
        assert len(set(names)) == len(names)
        assert all("values" in json.dumps(plot.spec, allow_nan=False) for plot in section.plots)
