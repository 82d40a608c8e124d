"""Converts the options of `twinphase simulate` and `plan` to a load and a deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from twinphase import (
    Closed,
    Deployment,
    Distribution,
    InvalidRequestError,
    Machine,
    Traced,
    TraceRequest,
    Users,
    drafted,
    roles_of,
)
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.load.workload import Sizing
from twinphase_bench.simulate.names import CLUSTER_OPTIONS

REQUESTS_PER_USER = 4
MIN_USER_REQUESTS = 200
DEFAULT_THINK_SECONDS = 30.0
DEFAULT_PROMPT = "lognormal:512:0.8"
DEFAULT_OUTPUT = "lognormal:200:0.6"
# Number of different token ids in synthetic prompts.
VOCABULARY = 1 << 20


@dataclass(frozen=True)
class UserOptions:
    """The options of users who wait for answers; None means that an option was not given."""

    users: int | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    reasoning_tokens: str | None = None
    think_time: float | None = None
    shared_prefix_tokens: int | None = None
    turns: int | None = None

    def check(self, has_other: bool) -> None:
        """Refuse options that have no effect.

        Raises:
            InvalidRequestError: an option has no effect; the message names it.
        """
        if self.users is not None and has_other:
            raise InvalidRequestError(
                "--users is given together with a trace, a rate or a concurrency.", "Give one."
            )
        if self.users is None:
            for name, value in vars(self).items():
                if value is not None:
                    option = f"--{name.replace('_', '-')}"
                    raise InvalidRequestError(f"{option} needs --users.", "Give both.")

    def made(self, max_tokens: int, seed: int) -> Users:
        think = DEFAULT_THINK_SECONDS if self.think_time is None else self.think_time
        reasoning = self.reasoning_tokens
        return Users(
            self.users or 1,
            think,
            Distribution.parse(self.prompt_tokens or DEFAULT_PROMPT),
            Distribution.parse(self.output_tokens or DEFAULT_OUTPUT),
            reasoning=Distribution.parse(reasoning) if reasoning else None,
            shared_prefix=self.shared_prefix_tokens or 0,
            turns=self.turns or 1,
            max_tokens=max_tokens,
            seed=seed,
        )


@dataclass(frozen=True)
class LoadPlan:
    """The requests of a simulation.

    Attributes:
        workload, arrivals: descriptions of one line each, for the report.
        requests: requests of an open loop, or of a closed one with `concurrency` in flight.
        users: users who send `num_requests` requests instead of `requests`.
    """

    workload: str
    arrivals: str
    requests: Sequence[TraceRequest] = ()
    concurrency: int | None = None
    rate: float | None = None
    users: Users | None = None
    num_requests: int = 0
    conditions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of `run_requests`."""
        return {
            "requests": self.requests,
            "concurrency": self.concurrency,
            "users": self.users,
            "num_requests": self.num_requests,
        }


def load_plan(load: LoadOptions, users: UserOptions, context: int) -> LoadPlan:
    """The load that the options describe, for a model with a context of `context` tokens.

    Raises:
        InvalidRequestError: no load is described, or a value is invalid.
    """
    users.check(load.wanted)
    if users.users is not None:
        made = users.made(context, load.seed)
        number = load.num_prompts or max(MIN_USER_REQUESTS, REQUESTS_PER_USER * made.count)
        words = [f"prompts {made.prompt}", f"answers {made.output}"]
        words += [f"reasoning {made.reasoning}"] if made.reasoning else []
        words += [f"a shared prefix of {made.shared_prefix}"] if made.shared_prefix else []
        words += [f"conversations of {made.turns} turns"] if made.turns > 1 else []
        return LoadPlan(
            f"{number:,} requests: {', '.join(words)} tokens",
            f"{made.count:,} users who wait for their answers, think time {made.think_time:g} s",
            users=made,
            num_requests=number,
            notes=["each user's first question comes within the first think time"],
        )
    if not load.wanted:
        raise InvalidRequestError(
            "There is no load.", "Give --users, --trace, --request-rate or --max-concurrency."
        )
    load.check()
    workload = load.workload(Sizing(vocab_size=VOCABULARY))
    arrivals = load.arrivals()
    offsets = arrivals.offsets([one.timestamp for one in workload.requests])
    moments = offsets or [0.0] * len(workload.requests)
    requests = [
        TraceRequest(moment, one.max_tokens, partial(list, one.prompt.token_ids))
        for one, moment in zip(workload.requests, moments, strict=True)
        if len(one.prompt.token_ids) + one.max_tokens <= context
    ]
    left_out = len(workload.requests) - len(requests)
    if not requests:
        raise InvalidRequestError(
            f"No request of the load fits the context of {context:,} tokens.",
            "Lower --scale-lengths, or choose another model.",
        )
    notes = list(workload.notes)
    notes += [f"{left_out:,} requests beyond the context were left out"] if left_out else []
    rate = load.request_rate
    if isinstance(arrivals, Traced) and offsets[-1] > 0:
        rate = (len(offsets) - 1) / offsets[-1]
    return LoadPlan(
        workload.description,
        str(arrivals),
        requests,
        concurrency=arrivals.concurrency if isinstance(arrivals, Closed) else None,
        rate=rate,
        conditions=workload.conditions,
        notes=notes,
    )


def deployment_of(
    model: str,
    machine: Machine,
    engine: Mapping[str, Any],
    cluster: Mapping[str, Any],
    *,
    dtype: str | None = None,
    decode_machine: Machine | None = None,
    acceptance: float | None = None,
    kv_bytes_per_second: float | None = None,
) -> Deployment:
    """The deployment that `serve`'s options describe.

    Raises:
        InvalidRequestError: only one of speculation and acceptance rate is given.
    """
    options = {name: value for name, value in engine.items() if name != "speculative_config"}
    speculation = engine.get("speculative_config")
    wanted = speculation not in (None, "none", "off")
    if wanted != (acceptance is not None):
        raise InvalidRequestError(
            "--speculative-config and --acceptance belong together.",
            "Give both, such as ngram and 0.7, or neither.",
        )
    return Deployment(
        model,
        machine,
        roles_of(*(cluster.get(name) for name in CLUSTER_OPTIONS[:3])),
        options,
        dtype=dtype or "",
        decode_machine=decode_machine,
        drafts=drafted(str(speculation)) if wanted else 0,
        acceptance=acceptance or 0.0,
        kv_bytes_per_second=kv_bytes_per_second,
    )
