"""Measures both phases of a server at a URL separately, from the client's side.

The server's own definitions of prefill and decode do not matter. `openai.py` is for loads.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from twinphase import Closed
from twinphase.phases.observation import Observation
from twinphase_bench.client.client import run
from twinphase_bench.load.run import run_load
from twinphase_bench.load.workload import LoadRequest, PromptMaker, Workload
from twinphase_bench.targets.openai import OpenAITarget, TargetFailedError
from twinphase_bench.targets.target import PhaseSample

PREFILL = (
    "Client TTFT of a request for one token, alone on the server: request sent .. first piece of "
    "output here. The server's tokenizing, queue and HTTP are in it, and the network; opening the "
    "connection is not. Tokens by the server's usage, those that it says were cached taken off."
)
DECODE = (
    "Gaps between pieces of output at the client, from the last request's first piece to the first "
    "request's last one: while all requests of the batch decode. Where pieces are not tokens: of a "
    "lone request (last token - first) / (tokens - 1), of several unknown."
)
TRIES = 3
# If the first token of a lone request is stamped later than this share of its TTFT (or 2 ms), the
# measurement is repeated.
MAX_LATE_PER_TTFT = 0.05
# The sweep is void if a larger share of the measurements was late again after the repetition.
MAX_LATE_SHARE = 0.05
MIN_GAPS_PER_SEQUENCE = 4
# An early request gets about this many tokens while one more prompt is prefilled.
OUTPUT_TOKENS_PER_PREFILL = 4


class PhasesOfUrl:
    """A server whose phases can be measured separately.

    Attributes:
        facts: facts for the report.
        target: the server as a target for load.
        observations: all measured requests, as the client saw them.
        num_measured: number of measurements so far.
        late: the client's faults in measurements that were late again after the repetition.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: str = "auto",
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        """Detect the server and its tokens per word; arguments, errors as `OpenAITarget.open`."""
        self.target = run(
            OpenAITarget.open(url, model=model, api_key=api_key, endpoint=endpoint, timeout=timeout)
        )
        self._prompts = PromptMaker(run(self.target.sizing()), seed)
        self.observations: list[Observation] = []
        self.num_measured = 0
        self.late = list[str]()
        self.facts = replace(
            self.target.facts, prefill_definition=PREFILL, decode_definition=DECODE
        )

    def prefill(self, num_tokens: int) -> PhaseSample:
        """Time a lone request for one token."""
        for _ in range(
            TRIES
        ):  # A first token that is half a character, or the end of text, is no output yet.
            [seen] = self._ask(1, num_tokens, 1)
            if not seen.error.startswith("no output"):
                break
        self._refuse_failed([seen])
        total = num_tokens if seen.num_prompt_tokens is None else seen.num_prompt_tokens
        computed = max(1, total - (seen.num_cached_tokens or 0))
        return PhaseSample(computed, (seen.token_times[0] - seen.sent,))

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        """Time requests while all of them decode; repeat with longer outputs if necessary."""
        extra = OUTPUT_TOKENS_PER_PREFILL * (batch - 1)
        for _ in range(TRIES):
            seen = self.together(batch, position, num_tokens + 1 + extra)
            gaps, before = window_gaps(seen)
            enough = batch == 1 or len(gaps or ()) >= batch * min(MIN_GAPS_PER_SEQUENCE, num_tokens)
            if gaps is not None and enough and any(gaps):
                break
            extra = extra if gaps is None else max(2 * extra, num_tokens)
        if gaps is None:
            counts = ", ".join(
                f"{len(one.token_times)} pieces for {one.num_output_tokens or 'unknown'} tokens"
                for one in seen
            )
            raise TargetFailedError(
                f"The time of a decode step is unknown: {counts}. When each token came is unknown.",
                "Check that the server sends each token by itself, and counts them (usage).",
            )
        if not any(gaps):  # There are no gaps, or all pieces were read at the same moment.
            raise TargetFailedError(
                f"The server did not decode {batch} requests of {position:,} tokens at once: no "
                "two tokens of each came apart while all were being answered.",
                "Check how many requests it runs in parallel.",
            )
        prompts = [
            position if one.num_prompt_tokens is None else one.num_prompt_tokens for one in seen
        ]
        return PhaseSample(statistics.mean(prompts) + before, tuple(gaps), batch)

    def together(self, count: int, num_tokens: int, max_tokens: int) -> list[Observation]:
        """Send `count` requests at once, each with a prompt of about `num_tokens` tokens.

        Raises:
            TargetFailedError: a request failed.
        """
        seen = self._ask(count, num_tokens, max_tokens)
        self._refuse_failed(seen)
        return seen

    def forget(self) -> None:
        """Restart the count of requests."""
        self.observations.clear()
        self.num_measured = 0
        self.late = []

    def close(self) -> None:
        """Do nothing: each request has its own connection."""

    def client_fault(self) -> str:
        """Why the sweep is void, because the client was late too often; "" if it is not."""
        if len(self.late) <= MAX_LATE_SHARE * self.num_measured:
            return ""
        return (
            f"In {len(self.late)} of {self.num_measured} measurements, repeated or not: "
            f"{self.late[0]}"
        )

    def _ask(self, count: int, num_tokens: int, max_tokens: int) -> list[Observation]:
        """Send requests at once; repeat, and finally note it, if the client itself was late."""
        self.num_measured += 1
        for _ in range(TRIES):
            requests = tuple(
                LoadRequest(self._prompts.take(num_tokens), max_tokens) for _ in range(count)
            )
            found = run(run_load(self.target, Workload(requests), Closed(count)))
            ttft = min(found.ttft, default=0.0)
            # Half a gap is allowed; a lone first token has no gap.
            gap = statistics.median(found.itl) if found.itl else 2 * MAX_LATE_PER_TTFT * ttft
            self.observations += found.observations
            faults = found.client.faults(ttft, gap)
            if not faults:
                return found.observations
        self.late.append("; ".join(faults))
        return found.observations

    def _refuse_failed(self, seen: list[Observation]) -> None:
        for one in seen:
            if not one.succeeded:
                raise TargetFailedError(f"{self.facts.name} failed: {one.error or 'no output'}")


def window_gaps(seen: list[Observation]) -> tuple[list[float] | None, float]:
    """Seconds per token while all sequences decode, and the mean output position.

    A gap counts if both of its ends lie between the last first piece and the first last piece. If
    pieces are not tokens, a lone sequence has its mean; with several sequences the result is None,
    because the tokens within the window are unknown.
    """
    if any(one.num_output_tokens != len(one.token_times) for one in seen):
        first = seen[0]
        if len(seen) > 1 or first.tpot is None or first.num_output_tokens is None:
            return None, 0.0
        return [first.tpot] * (first.num_output_tokens - 1), first.num_output_tokens / 2
    begin = max(one.token_times[0] for one in seen)
    end = min(one.token_times[-1] for one in seen)
    gaps = []
    before = []
    for one in seen:
        for index, (a, b) in enumerate(zip(one.token_times, one.token_times[1:], strict=False), 1):
            if a >= begin and b <= end:
                gaps.append(b - a)
                before.append(index)
    return gaps, statistics.mean(before) if before else 0.0
