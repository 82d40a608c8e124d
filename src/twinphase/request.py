"""What a user asks for (`SamplingParams`), and a request's state in the engine (`Request`).

Holds ids and numbers only: no text, no arrays, no engine.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twinphase.constraint import (
    Constraint,
    StructuredOutputsParams,
    reject,
)
from twinphase.errors import InvalidRequestError
from twinphase.outcome import FinishReason, PrefixMiss, RequestStatus
from twinphase.settings import ConfigField, check_settings, check_value, setting
from twinphase.speculative import MOST_DRAFTED

MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
TOKEN_ID = ConfigField("A token id.", minimum=0, maximum=MAX_TOKENS)
BIAS = ConfigField("Added to a token's logit.", minimum=-100, maximum=100)
WEIGHT = ConfigField("Share of the engine beside other tenants.", minimum=1e-3, maximum=1e3)
PRIORITY = ConfigField("Lower goes first.", minimum=-(2**31), maximum=2**31 - 1)
MAX_SALT_BYTES = 1024
# Slots for recurrent states that a running request writes in turn.
OWN_SLOTS = 2
# Rows that a slot has room for beside the state: those that it has yet to take up, and drafts.
STATE_LOG_ROWS = 8
# What a model may have sampling defaults of.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass(frozen=True)
class GenerationDefaults:
    """Where the sampling values come from that a request leaves out; the names are vLLM's."""

    generation_config: str = setting(
        "auto",
        "Source of the sampling values that are not given: auto is the model's own generation "
        "config or its catalogue entry; vllm or none keeps temperature 1 and top_p 1; or the path "
        "of a generation_config.json or its folder.",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None,
        "Sampling values that replace those of --generation-config, as a JSON object such as "
        "'{\"temperature\": 0.2}'.",
    )

    def check_override(self) -> None:
        """Refuse values of `override_generation_config` that no request could have.

        Raises:
            InvalidRequestError: an unknown name, no number, or one out of its range.
        """
        given = self.override_generation_config or {}
        for name, value in given.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if name not in SAMPLING_DEFAULTS or not number:
                raise InvalidRequestError(
                    f"override_generation_config has {name}: {value!r}.",
                    f"Use numbers for {', '.join(SAMPLING_DEFAULTS)}.",
                )
        SamplingParams(**given)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; the field names and defaults are vLLM's.

    Plain values only, since it is sent between processes and written to the step log.

    Raises:
        InvalidRequestError: a value out of its range (NaN and infinity included), or two that
            exclude each other.
    """

    temperature: float = setting(
        1.0,
        "Temperature of sampling; 0 always takes the most likely token.",
        minimum=0,
        maximum=100,
    )
    top_k: int = setting(
        0,
        "Sample from this many of the most likely tokens; 0 or -1: from all.",
        minimum=-1,
        maximum=MAX_TOKENS,
    )
    top_p: float = setting(
        1.0,
        "Sample from the most likely tokens that together have this probability.",
        above=0,
        maximum=1,
    )
    min_p: float = setting(
        0.0,
        "Drop tokens less likely than this share of the most likely one's probability.",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = setting(
        1.0,
        "Penalty for tokens of the prompt and the output; 1 is none.",
        minimum=0.01,
        maximum=100,
    )
    presence_penalty: float = setting(
        0.0, "Penalty for tokens that are in the output already; 0 is none.", minimum=-2, maximum=2
    )
    frequency_penalty: float = setting(
        0.0, "Penalty per occurrence of a token in the output; 0 is none.", minimum=-2, maximum=2
    )
    logit_bias: dict[int, float] | None = setting(
        None, "Add BIAS (-100 to 100) to a token's logit, as ID=BIAS; repeatable."
    )
    bad_words: Sequence[str] | None = setting(None, "Never generate this text; repeatable.")
    allowed_token_ids: Sequence[int] | None = setting(
        None, "Restrict the output to these token ids; repeatable."
    )
    seed: int | None = setting(
        None,
        "Seed of the random draws.",
        minimum=0,
        maximum=2**64 - 1,
        default_text="drawn by the engine",
    )
    stop: str | Sequence[str] | None = setting(None, "End the output before this text; repeatable.")
    stop_token_ids: Sequence[int] | None = setting(
        None, "End the output at this token; repeatable."
    )
    include_stop_str_in_output: bool = setting(
        False, "Keep the text or token that ends the output."
    )
    max_tokens: int | None = setting(
        16,
        "Maximum output tokens.",
        minimum=1,
        maximum=MAX_TOKENS,
        default_text="the rest of the context",
    )
    min_tokens: int = setting(
        0, "Output tokens before the output may end.", minimum=0, maximum=MAX_TOKENS
    )
    ignore_eos: bool = setting(False, "Continue after the token that ends the output.")
    logprobs: int | None = setting(
        None,
        "Log probabilities per output token: of the sampled token, and of this many most likely "
        "tokens.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = setting(
        None,
        "Log probabilities per prompt token except the first: of the token itself, and of this "
        "many most likely tokens.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    n: int = setting(1, "Answers per prompt.", minimum=1, maximum=1 << 20)
    structured_outputs: StructuredOutputsParams | None = setting(
        None,
        'Form of the output, as JSON with one of json, regex, choice, grammar: \'{"choice": '
        '["yes", "no"]}\'.',
    )
    thinking_token_budget: int | None = setting(
        None,
        "Tokens of thinking after which its end is forced.",
        minimum=0,
        maximum=MAX_TOKENS,
        default_text="no limit",
    )
    num_speculative_tokens: int | None = setting(
        None,
        "Draft tokens per step for this request at most; 0: none. The output stays the same.",
        minimum=0,
        maximum=MOST_DRAFTED,
        default_text="as --speculative-config allows",
    )

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, dict):  # The step log stores it as a mapping.
            object.__setattr__(
                self, "structured_outputs", StructuredOutputsParams(**self.structured_outputs)
            )
        check_settings(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for token_id in self.stop_token_ids or ():
            check_value("stop_token_ids", token_id, "int", TOKEN_ID)
        for token_id, bias in (self.logit_bias or {}).items():
            check_value("logit_bias", token_id, "int", TOKEN_ID)
            check_value("logit_bias", bias, "float", BIAS)
        for token_id in self.allowed_token_ids or ():
            check_value("allowed_token_ids", token_id, "int", TOKEN_ID)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            reject(
                "allowed_token_ids", self.allowed_token_ids, "one token id or more, or leave it out"
            )
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words or ())):
            for text in texts:
                if not isinstance(text, str) or not text:
                    reject(name, text, "non-empty strings")
        for text in self.bad_words or ():
            if not text.strip():  # vLLM's rule strips it to nothing.
                reject("bad_words", text, "words that are not only white space")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                reject(
                    "structured_outputs",
                    type(self.structured_outputs).__name__,
                    "StructuredOutputsParams",
                )
            for name in ("min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise InvalidRequestError(
                        f"{name} is given together with structured_outputs.",
                        "Drop one of them: the grammar decides where the output may end, and "
                        "then it has to.",
                    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    def ends_at(
        self, token_id: int, num_output_tokens: int, eos_token_ids: Collection[int]
    ) -> bool:
        """Whether `token_id`, the output's `num_output_tokens`-th, ends the output."""
        ends = (token_id in eos_token_ids and not self.ignore_eos) or token_id in (
            self.stop_token_ids or ()
        )
        return ends and num_output_tokens >= self.min_tokens

    @property
    def constrained(self) -> bool:
        """Whether the request needs a `Constraint`."""
        return self.has_form or bool(self.bad_words or self.allowed_token_ids)

    @property
    def has_form(self) -> bool:
        """Whether a grammar holds for the output, or a budget for its thinking."""
        return self.structured_outputs is not None or self.thinking_token_budget is not None


@dataclass
class RequestCounts:
    """The numbers of a request, without its tokens: what reports and explanations show.

    Attributes:
        num_cached_tokens: prompt tokens that the prefix cache held when the request was first
            admitted, or later when another request computed them first.
        prefix_miss: why the cache did not hold more; None when nothing more could be held.
        num_preemptions: how often the request lost its KV to others.
        num_recomputed_tokens: tokens computed once more after that.
        error: one line, when it failed.
        sampling_params: what it asked for; None where that is not known.
        num_draft_tokens: guesses at its next tokens that were computed; `num_accepted_draft_tokens`
            were right.
        num_accepted_prediction_tokens, num_rejected_prediction_tokens: those of them from its
            user's prediction.
        draft_steps: numbers of computed and accepted drafts in each step with drafts.
    """

    request_id: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prefix_miss: PrefixMiss | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    error: str | None = None
    sampling_params: SamplingParams | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    draft_steps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def copy(self) -> RequestCounts:
        """Independent counts, for another thread."""
        return replace(self, draft_steps=list(self.draft_steps))


@dataclass
class StateSlots:
    """Where a running request keeps the state of a model's recurrent layers.

    Attributes:
        source: the slot that its next step reads: one of its own, a snapshot, or the zeros.
        own: the two slots that are written in turn.
        pending: rows in the source that its state has yet to take up.
        snapshots: slots where the next step leaves its state at a position, by position.
        branch: a position where cached blocks end that have no snapshot; 0 is none.
        last_snapshot: the largest position where it found or left a snapshot.
    """

    source: int
    own: tuple[int, int]
    pending: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)
    branch: int = 0
    last_snapshot: int = 0

    @property
    def target(self) -> int:
        """The slot that the next step writes which takes up all rows."""
        return self.own[1] if self.source == self.own[0] else self.own[0]

    @property
    def log_room(self) -> int:
        """Rows that the next step may leave in the source, whose state then stays as it is."""
        return STATE_LOG_ROWS - self.pending if self.source in self.own else 0


@dataclass(eq=False)
class Request:
    """One request and its progress.

    `num_computed_tokens` is the one arithmetic of the engine: tokens of prompt + output whose KV is
    in the cache. Chunks, prefix hits, preemption and speculation all are ways of advancing it.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        arrival_time: seconds on the engine's clock.
        priority: lower goes first; honoured by the policy "priority" only.
        cache_salt: requests share cached prefixes only with those of the same salt.
        tenant: whose request it is; tenants share the engine by `weight`, which is that of the
            tenant's last request.
        order: place in the line of arrival, given by the scheduler.
        most_computed_tokens: the largest `num_computed_tokens` so far.
        state: its slots, while it runs, where the model has recurrent layers.
        block_hashes: hashes of its leading full blocks, as far as they were needed.
        fresh: whether its cached prefix is not trusted and must be discarded.
        constraint: what its tokens must obey; never shared with another request.
        prediction_token_ids: what its user expects it to say.
        counts: counts of the request's events so far, shared with its front end.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = field(default_factory=time.perf_counter)
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    weight: float = 1.0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    order: int = -1
    most_computed_tokens: int = 0
    state: StateSlots | None = None
    block_hashes: list[bytes] = field(default_factory=list, repr=False)
    fresh: bool = False
    constraint: Constraint | None = field(default=None, repr=False)
    prediction_token_ids: list[int] = field(default_factory=list, repr=False)
    counts: RequestCounts = field(default_factory=RequestCounts)

    def __post_init__(self) -> None:
        self.counts.request_id = self.request_id
        self.counts.num_prompt_tokens = len(self.prompt_token_ids)
        self.counts.num_output_tokens = len(self.output_token_ids)
        self.counts.sampling_params = self.sampling_params
        check_priority_and_salt(self.priority, self.cache_salt)
        check_tenant(self.tenant, self.weight)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log probabilities are still wanted: then all prompt rows are computed."""
        return self.sampling_params.prompt_logprobs is not None and not self.output_token_ids

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]


def check_priority_and_salt(priority: Any, salt: Any) -> None:
    """Raise `InvalidRequestError` for a priority or salt that no engine could honour."""
    check_value("priority", priority, "int", PRIORITY)
    if salt is not None and (
        not isinstance(salt, str) or not 0 < len(salt.encode(errors="replace")) <= MAX_SALT_BYTES
    ):
        shown = salt if isinstance(salt, str) and len(salt) < 40 else type(salt).__name__
        reject("cache_salt", shown, f"a text of 1 to {MAX_SALT_BYTES} bytes, or none")


def check_tenant(tenant: Any, weight: Any) -> None:
    """Raise `InvalidRequestError` for a tenant that is no text, or a weight that gives no share."""
    if not isinstance(tenant, str):
        reject("tenant", type(tenant).__name__, "a text")
    check_value("weight", weight, "float", WEIGHT)
