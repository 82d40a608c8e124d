"""Both phases of a server at a URL, told apart from outside: by what is asked of it and when its answers come.

What a server calls prefill or decode is its own (`foreign_claims.py`); here is what a client gets. Not for load.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict, replace
from typing import Any

from twinphase.bench.client import SEND_NOW, run
from twinphase.bench.foreign_claims import claims_reader
from twinphase.bench.load import ClientHealth, LoadResult
from twinphase.bench.observation import Observation
from twinphase.bench.target import DecodeSample, PrefillSample
from twinphase.bench.targets.openai import OpenAITarget, TargetFailedError
from twinphase.bench.workload import PromptMaker

__all__ = ["PhasesOfUrl", "window_gaps"]

PREFILL = (
    "Client TTFT of a request for one token, alone on the server: request sent .. first piece of output here. The "
    "server's tokenizing, queue and HTTP are in it, and the network; opening the connection is not. Tokens by the "
    "server's usage, those that it says were cached taken off."
)
DECODE = (
    "Gaps between pieces of output at the client, from the last request's first piece to the first request's last one: "
    "while all requests of the batch decode. Where a server sends several tokens in a piece, times pieces / tokens."
)
TRIES = 3
FEWEST_GAPS = 4  # of each sequence
TOKENS_A_PROMPT = 4  # that an early request gets, about, while one more prompt is read


class PhasesOfUrl:
    """A server whose phases can be measured apart.

    Attributes:
        facts: what a reader must know.
        target: the client.
        observations: every request that was measured, as the client saw it, with the server's claims.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: str = "auto",
        seed: int = 0,
    ) -> None:
        """Find the server and how long its prompts get; arguments and errors as for `OpenAITarget.open`."""
        self.target = run(OpenAITarget.open(url, model=model, api_key=api_key, endpoint=endpoint))
        self._prompts = PromptMaker(run(self.target.sizing()), seed)
        self.observations: list[Observation] = []
        self._reader = claims_reader(self.target, self._prompts)
        self.facts = replace(self.target.facts, prefill_definition=PREFILL, decode_definition=DECODE)

    def prefill(self, num_tokens: int) -> PrefillSample:
        """Time a lone request for one token.

        Raises:
            TargetFailedError: it failed.
        """
        seen = self._ask(1, num_tokens, 1)[0]
        for _ in range(TRIES - 1):  # a first token may be half a character, or the end of text: no output then
            if not seen.error.startswith("no output"):
                break
            seen = self._ask(1, num_tokens, 1)[0]
        self._refuse_failed([seen])
        total = num_tokens if seen.num_prompt_tokens is None else seen.num_prompt_tokens
        return PrefillSample(max(1, total - (seen.num_cached_tokens or 0)), seen.token_times[0] - seen.sent)

    def decode(self, position: int, batch: int, num_tokens: int) -> DecodeSample:
        """Time requests that decode together; asked for more tokens while they do not long enough.

        Raises:
            TargetFailedError: a request failed, or the server does not decode so many at once.
        """
        extra = TOKENS_A_PROMPT * (batch - 1)
        for _ in range(TRIES):
            seen = self._ask(batch, position, num_tokens + 1 + extra)
            self._refuse_failed(seen)
            gaps, before = window_gaps(seen)
            if len(gaps) >= batch * min(FEWEST_GAPS, num_tokens) or batch == 1:
                break
            extra = max(2 * extra, num_tokens)
        if not gaps:
            raise TargetFailedError(
                f"The server did not decode {batch} requests of {position:,} tokens at once: no two tokens of each "
                "came while all were being answered.",
                "See how many it runs in parallel.",
            )
        own = [position if one.num_prompt_tokens is None else one.num_prompt_tokens for one in seen]
        return DecodeSample(statistics.mean(own) + before, batch, tuple(gaps))

    def begin_claims(self) -> None:
        """From here on requests count, here and where the server counts them itself."""
        self.observations.clear()
        self._reader = claims_reader(self.target, self._prompts)
        if self._reader is not None:
            run(self._reader.before())

    def as_load(self) -> LoadResult:
        """All requests since `begin_claims`, in the form that the server's claims are compared with."""
        if self._reader is not None:
            run(self._reader.after())
        return LoadResult(
            self.facts,
            workload="the requests of the phase sweep",
            arrivals="one measurement after the other",
            rate=None,
            concurrency=None,
            observations=self.observations,
            num_requests=len(self.observations),
            client=ClientHealth(),
            claims=self._reader,
        )

    def raw(self) -> list[dict[str, Any]]:
        """Every request with its timestamps, plain values."""
        return [asdict(one) for one in self.observations]

    def close(self) -> None:
        """Nothing is held: each request has its own connection."""

    def _ask(self, count: int, num_tokens: int, max_tokens: int) -> list[Observation]:
        prompts = [self._prompts.take(num_tokens) for _ in range(count)]

        async def all_at_once() -> list[Observation]:
            replies = await asyncio.gather(*(self.target.start(one, max_tokens, SEND_NOW) for one in prompts))
            return [self.target.read(reply) for reply in replies]

        seen = run(all_at_once())
        self.observations += seen
        return seen

    def _refuse_failed(self, seen: list[Observation]) -> None:
        for one in seen:
            if not one.succeeded:
                raise TargetFailedError(f"{self.facts.name} failed: {one.error or 'no output'}")


def window_gaps(seen: list[Observation]) -> tuple[list[float], float]:
    """Seconds a token of every sequence while all of them decode, and the mean number of output tokens before those.

    A gap counts if both of its ends lie between the last first piece and the first last piece.
    """
    begin = max(one.token_times[0] for one in seen)
    end = min(one.token_times[-1] for one in seen)
    gaps, before = [], []
    for one in seen:
        pieces = len(one.token_times)
        tokens = one.num_output_tokens or pieces
        share = (pieces - 1) / (tokens - 1) if pieces > 1 and tokens > pieces else 1.0
        for index, (a, b) in enumerate(zip(one.token_times, one.token_times[1:], strict=False), 1):
            if a >= begin and b <= end:
                gaps.append((b - a) * share)
                before.append(index / share)
    return gaps, statistics.mean(before) if before else 0.0
