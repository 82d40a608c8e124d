"""Engines for the random mixes: with drafts right and wrong, and one for each request alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twinphase.batch import Batch, StepOutput, TokenLogprobs
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.config import EngineConfig
from twinphase.constraint import Constraint
from twinphase.engine.engine import Engine
from twinphase.engine.executor import Executor
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.recorder import StepRecorder
from twinphase.outcome import FinishReason
from twinphase.phases.cost import CostModel, starting_prices
from twinphase.request import Request, SamplingParams
from twinphase.sampling.thinking import ThinkingTags, make_constraint
from twinphase.sampling.token_filter import filtered
from twinphase.scheduler.scheduler import Scheduler
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.drafter import Drafter
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.speculator import Speculator

VOCAB = 320
MOST_BLOCKS = 40
MOST_SEQS = 8
# Names of files of models with recurrent layers, and how their engines run.
HYBRIDS = (
    "convolutions",
    "deltas",
    "deltas-and-experts",
    "spaces",
    "parallel",
    "halves",
    "next-token",
)
MOST_SLOTS = 16
STATES = {"state_interval": 16, "speculative_config": "auto"}
TAGS = ThinkingTags((50,), (51, 52, 53))


class Clock:
    """A clock that runs only while the engine works, so that the test's own time does not count."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since = None

    def __call__(self) -> float:
        return self._passed + (
            time.perf_counter() - self._since if self._since is not None else 0.0
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._passed = self()
            self._since = None


class Faulty:
    """An executor that computes nothing of a batch in which a doomed request is."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.doomed = set()

    def execute(self, batch: Batch) -> StepOutput:
        if any(share.request_id in self.doomed for share in batch.scheduled):
            raise RuntimeError("struck by the test")
        return self.executor.execute(batch)


class Guesser:
    """Drafts of any length: right ones, wrong ones, and right ones that go wrong."""

    def __init__(self, right: Callable[[Request], Sequence[int]], right_share: float = 0.5) -> None:
        """`right` tells a request's whole output; `right_share` of the guesses are."""
        self.right = right
        self.right_share = right_share
        self.random = random.Random(0)

    def draft(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        return {request.request_id: self.guess(request) for request in requests}

    def guess(self, request: Request) -> list[int]:
        known = len(request.output_token_ids)
        choose = self.random
        draft = list(self.right(request)[known : known + choose.choice([0, 1, 2, 7, 20])])
        if choose.random() >= self.right_share:
            draft[choose.randint(0, len(draft)) :] = [
                choose.randrange(VOCAB + 5) for _ in range(choose.randint(0, 5))
            ]
        return draft

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Do nothing: this drafter does not learn."""

    def forget(self, request: Request) -> None:
        """Do nothing: this drafter keeps no state."""


GUESSERS = ("adversary", "oracle", "mixed", "ngram", "suffix", "auto")


class Checked(DraftModel):
    """A draft model whose blocks are counted before each step."""

    def draft(
        self, requests: Sequence[Request], limits: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, Any]:
        self.check_integrity()
        return dict(super().draft(requests, limits))


def make_writer(loaded: LoadedEngine, num_blocks: int) -> Checked:
    """A draft model on a fresh cache; the blocks are as few as the engine's."""
    whole = loaded.engine
    return Checked(
        whole.executor.execute,
        KVCacheManager(num_blocks, 16),
        CostModel(starting_prices(whole.shape, None)),
        num_speculative_tokens=4,
        vocab_size=whole.vocab_size,
        max_model_len=512,
        max_num_batched_tokens=64,
        eos_token_ids=loaded.text.tokenizer.eos_token_ids,
    )


def make_drafter(
    kind: str, engine: Engine, right: Callable[[Request], Sequence[int]]
) -> Drafter | None:
    """A proposer by name; "auto" verifies the drafts that pay, the others every one.

    "mtp" is the layer of the model that the engine's executor has.
    """
    shares = {"adversary": 0.0, "oracle": 1.0, "mixed": 0.5}
    if kind in shares:
        return Guesser(right, shares[kind])
    if kind == "none":
        return None
    if kind == "mtp":
        text = engine.executor.executor.reader
    else:
        text = NgramProposer() if kind == "ngram" else SuffixProposer()
    proposers = [ForcedProposer(), PredictionProposer(), text]
    always = kind != "auto"
    slo_seconds = lambda: engine.scheduler.pace.slo_seconds  # noqa: E731
    return Speculator(proposers, engine.cost_model, most=8, slo_seconds=slo_seconds, always=always)


def make_engine(
    loaded: LoadedEngine,
    num_blocks: int,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
    **options: object,
) -> Engine:
    """A new engine on a loaded model, whose blocks still hold the KV of earlier engines."""
    whole = loaded.engine
    cost_model = CostModel(starting_prices(whole.shape, None))
    if loaded.blueprint.recurrent_layers:
        # Few slots, so that requests wait for them and snapshots are evicted.
        options = {**STATES, "num_state_slots": 5 + num_blocks // 4, **options}
    config = EngineConfig(
        num_kv_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=MOST_SEQS,
        itl_slo_ms=None,
        **options,
    )
    eos = loaded.text.tokenizer.eos_token_ids
    scheduler = Scheduler(config, cost_model, eos_token_ids=eos)
    scheduler.usual_output = 0.0  # so that blocks run out
    recorder = StepRecorder(whole.shape, cost_model, clock)
    executor = Faulty(whole.executor)
    sizes = {"shape": whole.shape, "vocab_size": whole.vocab_size}
    return Engine(scheduler, executor, recorder, **sizes, drafter=drafter)


def constraint_of(
    loaded: LoadedEngine, params: SamplingParams, prompt: Sequence[int]
) -> Constraint | None:
    """As `ModelText.constraint`, for a model that thinks."""
    form = (
        make_constraint(params, prompt, loaded.text.grammar_compiler, TAGS)
        if params.has_form
        else None
    )
    return filtered(form, params, partial(loaded.text.tokenizer.encode, add_special_tokens=False))


class Alone:
    """Each request alone, on a second copy of the model with another number of threads."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._known = {}

    def __call__(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], str, FinishReason]:
        """Tokens, log probabilities in full precision, and the finish reason."""
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            engine = make_engine(self._loaded, MOST_BLOCKS, time.perf_counter)
            request = Request("alone", list(prompt), params)
            logprobs = []
            request.constraint = constraint_of(self._loaded, params, prompt)
            engine.add_request(request)
            scored: list[TokenLogprobs] = []
            while engine.has_work:
                output = engine.step().output
                logprobs += output.logprobs.get("alone", [])
                scored += output.prompt_logprobs.get("alone", (0, []))[1]
            assert params.prompt_logprobs is None or len(scored) == len(prompt) - 1
            self._known[key] = (
                request.output_token_ids,
                repr(scored + logprobs),
                request.finish_reason,
            )
        return self._known[key]


def load(path: str | Path, **config: Any) -> LoadedEngine:
    if Path(path).stem in HYBRIDS:
        config = {**STATES, "num_state_slots": MOST_SLOTS, **config}
    return LoadedEngine(
        path, EngineConfig(num_kv_blocks=MOST_BLOCKS, max_num_batched_tokens=512, **config)
    )


def engines(path: str | Path, **config: Any) -> tuple[LoadedEngine, Alone]:
    """A model for mixes, and for each request alone with another number of threads."""
    return load(path, threads=2, **config), Alone(load(path, threads=1, **config))
