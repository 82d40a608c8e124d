"""Turns loads, of users who wait for answers or of traces, into requests for a fleet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from twinphase.simulate.spec import Outcome, TraceRequest
from twinphase.workload.lengths import Distribution

# Token ids of a user's own prompts begin here, so that no two requests share them.
OWN_IDS = 1 << 20
SHARED_ID = 5


@dataclass(frozen=True)
class Users:
    """Users who send a question, read the answer, and ask again.

    Attributes:
        count: number of users.
        think_time: mean seconds between an answer and the next question, with an exponential
            distribution.
        prompt, output: tokens per question and per answer.
        reasoning: reasoning tokens before each answer; None means no reasoning.
        shared_prefix: number of tokens that all prompts begin with.
        turns: questions per conversation; each prompt contains all earlier turns.
        max_tokens: maximum tokens of a prompt and its answer; longer ones are cut.
    """

    count: int
    think_time: float
    prompt: Distribution
    output: Distribution
    reasoning: Distribution | None = None
    shared_prefix: int = 0
    turns: int = 1
    max_tokens: int = 1 << 24
    seed: int = 0

    def start(self, num_requests: int) -> Load:
        return Load(self, num_requests)


class Load:
    """The requests of all users, up to a given number."""

    def __init__(self, users: Users, num_requests: int) -> None:
        self.users = users
        self.num_requests = num_requests
        self._sent = 0
        self._draw = random.Random(f"users/{users.seed}")
        # Number of turns and token ids of each user's conversation so far.
        self._history: dict[int, tuple[int, list[int]]] = {}

    def first(self) -> list[TraceRequest]:
        """Each user's first question; they are spread over one think time."""
        users = self.users
        moments = sorted(self._draw.uniform(0, users.think_time) for _ in range(users.count))
        return [
            self._ask(user, moment)
            for user, moment in islice(enumerate(moments), self.num_requests)
        ]

    def next(self, asked: TraceRequest, outcome: Outcome) -> TraceRequest | None:
        """The user's next question, after reading the answer."""
        if self._sent >= self.num_requests:
            return None
        mean = self.users.think_time
        pause = self._draw.expovariate(1 / mean) if mean > 0 else 0.0
        return self._ask(asked.user, outcome.token_times[-1] + pause)

    def _ask(self, user: int, moment: float) -> TraceRequest:
        users = self.users
        number = self._sent
        self._sent += 1
        turn, history = self._history.get(user, (0, []))
        if turn >= users.turns or not turn:
            turn = 0
            history = [SHARED_ID] * users.shared_prefix
        question = users.prompt.draw(self._draw)
        thinking = users.reasoning.draw(self._draw) if users.reasoning else 0
        answer = users.output.draw(self._draw)
        room = users.max_tokens - len(history)
        if question + thinking + answer > room:
            history = []
            question = min(question, max(1, users.max_tokens // 2))
            room = users.max_tokens - question
            thinking = min(thinking, max(0, room - answer - 1))
            answer = max(1, min(answer, room - thinking))
        prompt = [*history, *([OWN_IDS + number] * question)]
        if users.turns > 1:
            # The answer becomes part of the next prompt, but its reasoning does not.
            self._history[user] = turn + 1, [*prompt, *([7] * answer)]
        return TraceRequest(
            moment, thinking + answer, lambda: prompt, num_reasoning=thinking, user=user
        )


def open_load(
    offsets: Sequence[float],
    prompt: Distribution,
    output: Distribution,
    *,
    reasoning: Distribution | None = None,
    shared_prefix: int = 0,
    max_tokens: int = 1 << 24,
    seed: int = 0,
) -> list[TraceRequest]:
    """Requests at the given times, in seconds, with lengths drawn from these distributions."""
    users = Users(
        len(offsets),
        0.0,
        prompt,
        output,
        reasoning=reasoning,
        shared_prefix=shared_prefix,
        max_tokens=max_tokens,
        seed=seed,
    )
    made = Load(users, len(offsets)).first()
    return [_at(one, moment) for one, moment in zip(made, offsets, strict=True)]


def closed_loop(
    requests: Sequence[TraceRequest], concurrency: int
) -> tuple[list[TraceRequest], Callable[[TraceRequest, Outcome], TraceRequest | None]]:
    """The first requests of a closed loop, and a function that returns one after each answer."""
    rest: Iterator[TraceRequest] = iter(requests)
    first = [_at(one, 0.0) for one in islice(rest, concurrency)]

    def follow_up(asked: TraceRequest, outcome: Outcome) -> TraceRequest | None:
        request = next(rest, None)
        return None if request is None else _at(request, outcome.token_times[-1])

    return first, follow_up


def _at(request: TraceRequest, moment: float) -> TraceRequest:
    return TraceRequest(
        moment, request.num_outputs, request.prompt, request.num_reasoning, request.user
    )
