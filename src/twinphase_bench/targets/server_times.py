"""A server's own latencies compared to its client's: definitions and differences.

A claim is part of the replies to the measured requests. Missing claims are not estimated.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from twinphase.phases.observation import Observation
from twinphase_bench.load.run import LoadResult
from twinphase_bench.report.report import Column, Section, table_of

OURS = {
    "TTFT": "first piece of output at the client - intended send",
    "TPOT": "(last piece - first piece) / (output tokens - 1), at the client",
    "E2E": "last piece of output at the client - intended send",
    "decode time": "last piece - first piece of output, at the client",
}
NOT_SEEN = "a client cannot see it"
DIFFERENCE = "median over the requests of ours - theirs"


class Source(NamedTuple):
    """A server's name for a figure, and its definition."""

    name: str
    figure: str
    definition: str


# These are fields of replies in milliseconds, according to the projects' sources and documentation
# of October 2025.
TWINPHASE = (
    Source(
        "ttft_ms", "TTFT", "first token handed to the socket - arrival, queue and tokenizing in it"
    ),
    Source(
        "tpot_ms", "TPOT", "(last token - first token) / (output tokens - 1), handed to the socket"
    ),
    Source("e2e_ms", "E2E", "end of the request's ledger - arrival"),
)
LLAMA_CPP = (
    Source(
        "prompt_ms",
        "TTFT",
        "start of prompt processing to first sampled token: no queue, HTTP or text handling",
    ),
    Source(
        "predicted_per_token_ms",
        "TPOT",
        "time since first token / all tokens: n - 1 gaps divided by n",
    ),
)
VLLM = (
    Source("queue_time_ms", "queue", "time in vLLM's waiting queue"),
    Source(
        "time_to_first_token_ms", "TTFT", "first token generated - scheduled: no queue, no HTTP"
    ),
    Source("mean_itl_ms", "TPOT", "mean gap between generated tokens"),
    Source("generation_time_ms", "decode time", "last token generated - first token generated"),
)
# Sources by the claim in a reply; of two with the same name, the one whose first field is present.
IN_REPLIES = (("timings", TWINPHASE), ("timings", LLAMA_CPP), ("metrics", VLLM))


@dataclass(frozen=True)
class Claim:
    """One figure of a server and ours, in seconds.

    Attributes:
        figure: "TTFT", "TPOT", ...
        ours, theirs: medians over the requests; `ours` is None if a client cannot measure it.
        difference: median over the requests of ours - theirs.
        number: number of requests with the claim.
        definition: the server's formula.
        source: the server's field.
    """

    figure: str
    ours: float | None
    theirs: float
    difference: float | None
    number: int
    definition: str
    source: str


def claims_of(result: LoadResult) -> list[Claim]:
    """All of the server's claims about this load."""
    found = []
    done = set()
    for key, sources in IN_REPLIES:
        fields_of = [(one, one.claims.get(key, {})) for one in result.succeeded]
        if key in done or not any(sources[0].name in fields for _, fields in fields_of):
            continue
        done.add(key)
        for name, figure, definition in sources:
            pairs = [
                (_our_value(one, figure), fields[name] / 1e3)
                for one, fields in fields_of
                if isinstance(fields.get(name), (int, float))
            ]
            if not pairs:
                continue
            theirs = statistics.median(value for _, value in pairs)
            both = [(a, b) for a, b in pairs if a is not None]
            ours = statistics.median(a for a, _ in both) if both else None
            difference = statistics.median(a - b for a, b in both) if both else None
            found.append(
                Claim(
                    figure,
                    ours,
                    theirs,
                    difference,
                    number=len(pairs),
                    definition=definition,
                    source=f"{key}.{name}",
                )
            )
    return found


def claims_section(result: LoadResult) -> Section:
    """A section with the server's claims and ours."""
    title = "The server's own claims"
    claims = claims_of(result)
    if not claims:
        return Section(
            title, paragraphs=(f"The replies of {result.facts.engine} have none that is read.",)
        )
    columns = (
        "figure",
        "ours, ms",
        "theirs, ms",
        Column("difference, ms", DIFFERENCE),
        "requests",
        "our definition",
        "their definition",
        "their name",
    )
    rows = [
        (
            claim.figure,
            NOT_SEEN if claim.ours is None else f"{1e3 * claim.ours:.2f}",
            f"{1e3 * claim.theirs:.2f}",
            "" if claim.difference is None else f"{1e3 * claim.difference:+.2f}",
            str(claim.number),
            OURS.get(claim.figure, NOT_SEEN),
            claim.definition,
            claim.source,
        )
        for claim in claims
    ]
    return Section(title, tables=[table_of("Claims", columns, rows)])


def _our_value(seen: Observation, figure: str) -> float | None:
    if figure == "decode time":  # A request of one token has no decode time, as vLLM counts.
        if seen.last_token is None or seen.num_output_tokens == 1:
            return None
        return seen.last_token - seen.token_times[0]
    return {"TTFT": seen.ttft, "TPOT": seen.tpot, "E2E": seen.e2e}.get(figure)
