"""Loads a model by name and makes a warm engine for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from twinphase.backends.base import Backend, KVCacheSpec, Units
from twinphase.backends.device import require_torch
from twinphase.blueprint import Blueprint
from twinphase.config import EngineConfig, cores_of_each_engine
from twinphase.engine.engine import Engine
from twinphase.engine.frontends.checks import USE, Prompt, task_of
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.loading.ceilings import compute_units, device_of, measured_ceilings
from twinphase.engine.loading.drafting import (
    add_draft_model,
    draft_config,
    drafts_by_mtp,
    load_mtp,
    open_draft_model,
)
from twinphase.engine.ranks.backend import load_on_ranks
from twinphase.engine.ranks.ranks import rank_facts
from twinphase.engine.recorder import StepRecorder
from twinphase.engine.runner import Runner
from twinphase.engine.trace import TraceWriter, trace_header
from twinphase.errors import InvalidRequestError, StorageError
from twinphase.explain.evidence import Machine
from twinphase.explain.explanation import Explanation, explain
from twinphase.models.decoder import Decoder
from twinphase.models.loader import open_model, read_blueprint
from twinphase.phases.cost import CostModel, starting_prices
from twinphase.phases.hardware import Ceilings, save_ceilings
from twinphase.phases.report import phase_report
from twinphase.phases.timeline import RequestTimeline
from twinphase.phases.work import ModelShape, model_shape
from twinphase.request import STATE_LOG_ROWS, Request, RequestCounts, SamplingParams
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.pacing import Pacing
from twinphase.scheduler.scheduler import Scheduler
from twinphase.speculation.hidden_states import HiddenStateProposer
from twinphase.speculation.load_heads import load_heads
from twinphase.speculation.speculator import make_speculator
from twinphase.speculative import HEADS, speculative_config
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.hub import resolve_model

# The first of these requests runs with cold caches.
WARM_UP_PROMPT_DIVISORS = (8, 4, 16, 32)
MAX_KEPT_PACES = 5


class LoadedEngine:
    """A model, its engine, and the conversion between text and token ids.

    Attributes:
        config: configuration as resolved for this model.
        ranks: the processes that compute the model, if there are several.
        warm_timeline: timeline of the request that `warm_up` computed alone; None before `warm_up`.
    """

    warm_timeline: RequestTimeline | None = None
    task = "generate"

    def __init__(
        self,
        model: str | Path | Checkpoint,
        config: EngineConfig = EngineConfig(),
        *,
        compile_progress: Callable[[float, int, str], None] | None = None,
        load_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load a model; see `LLM` for the arguments and errors.

        `load_progress` is called with (done, total) layers.
        """
        self._paces: deque[Pace] = deque(maxlen=MAX_KEPT_PACES)
        self.checkpoint = (
            model
            if isinstance(model, Checkpoint)
            else open_model(resolve_model(str(model)), quantization=config.quantization)
        )
        task = task_of(self.checkpoint, config)
        if task != "generate":
            raise InvalidRequestError(
                f"{self.checkpoint.path.name} would be loaded to {task}, but only models that "
                "generate text can be loaded here.",
                USE[task],
            )
        b = self.blueprint = read_blueprint(self.checkpoint, config.max_model_len)
        device = device_of(config)
        speculation = speculative_config(config.speculative_config)
        has_mtp = drafts_by_mtp(speculation, self.checkpoint, b)

        def head_bytes(dim: int) -> float:
            return device.kv_head_bytes(dim, config.kv_cache_dtype)

        kv_bytes = b.kv_bytes(head_bytes) + has_mtp * b.num_kv_heads * head_bytes(b.head_dim)
        state_bytes = b.state_bytes(STATE_LOG_ROWS)
        memory = device.free_memory()
        self.config = config.resolve(b.context_length, kv_bytes, memory, state_bytes)
        self.text = ModelText(self.checkpoint)
        backend = make_backend(self.config, compile_progress)
        heads: HiddenStateProposer | None = None
        if speculation.method in HEADS:
            folder = Path(speculation.model)
            most = speculation.num_speculative_tokens
            heads = load_heads(folder, speculation.method, self.checkpoint, b.num_layers, most)
        drafts = None
        if speculation.method == "draft_model":
            drafts = open_draft_model(speculation.model, self.checkpoint, self.config.quantization)
        loaded, backend = load_on_ranks(self.checkpoint, b, self.config, backend, load_progress)
        self.backend = backend
        if has_mtp:
            other = make_backend(self.config, compile_progress)
            heads = load_mtp(loaded, self.checkpoint, other, self.config, speculation)
        costs = model_shape(self.checkpoint, b)
        eos = self.text.tokenizer.eos_token_ids
        self.engine = make_engine(self.config, loaded, backend, costs, eos, heads)
        if drafts is not None:
            draft = LoadedEngine(drafts, draft_config(self.config, drafts)).engine
            add_draft_model(self.engine, draft, speculation.num_speculative_tokens)
        cache_bytes = (
            (self.config.num_kv_blocks or 0) * self.config.block_size * backend.kv_bytes_per_token()
        )
        self.ranks = rank_facts(self.checkpoint, b, self.config, cache_bytes)
        if backend.device_sampler is not None:
            limits = self.config.max_num_seqs, self.config.max_model_len or 1
            backend.device_sampler.capture(loaded.forward, *limits, compile_progress)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Encode a prompt that must fit this engine's context, as `ModelText.encode` does."""
        return self.text.encode(prompt, self.config.max_model_len)

    def warm_up(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Compute made-up requests: the first ones touch the memory, and the last one is timed.

        The first requests are short and of several lengths, so that the cost model can separate the
        fixed time of a step from the time per token. `warm_timeline` is that of the last request.
        """
        for part in WARM_UP_PROMPT_DIVISORS:
            self._compute(f"touch-{part}", num_prompt_tokens // part, 2)
        self.warm_timeline = self._compute("warm-up", num_prompt_tokens, num_output_tokens)

    def _compute(
        self, name: str, num_prompt_tokens: int, num_output_tokens: int
    ) -> RequestTimeline:
        engine = self.engine
        config = self.config
        # A made-up prompt is unusually easy to draft for.
        drafter = engine.drafter
        engine.drafter = None
        limit = min(config.max_model_len or 2, (config.num_kv_blocks or 1) * config.block_size)
        num_output_tokens = max(1, min(num_output_tokens, limit - 1))
        prompt = [1] * max(1, min(num_prompt_tokens, limit - num_output_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        request = Request(name, prompt, params, arrival_time=engine.clock(), cache_salt=name)
        timeline = engine.add_request(request)
        while engine.has_work:
            result = engine.step()
            timeline.hand_over_tokens(len(result.output.token_ids.get(name, ())), engine.clock())
        if drafter is not None:
            drafter.forget(request)
        engine.drafter = drafter
        kv_cache = engine.scheduler.kv_cache
        kv_cache.num_queried_tokens = kv_cache.num_hit_tokens = 0
        return timeline

    @cached_property
    def units(self) -> Units:
        return compute_units(self.checkpoint, self.config)

    @cached_property
    def _prompt_isa(self) -> str | None:
        """`Device.prompt_isa`, if it would multiply this model's weights otherwise."""
        name = device_of(self.config).prompt_isa
        if name is None:
            return None
        there = compute_units(self.checkpoint, replace(self.config, isa=name))
        return name if there.linear != self.units.linear else None

    @cached_property
    def _final_ceilings(self) -> Ceilings | None:
        known = measured_ceilings(self.config)
        return None if known is None or known.provisional else known

    def doubt_ceilings(self, timeline: RequestTimeline) -> None:
        """Mark the stored ceilings provisional if a request was faster than they allow."""
        kept = self._final_ceilings
        if (
            kept
            and phase_report(
                timeline, units=self.units, ceilings=kept, wall_seconds=0.0
            ).over_ceiling
        ):
            self._final_ceilings = None
            with suppress(OSError):
                save_ceilings(replace(kept, provisional=True))

    def settle_pace(self) -> Pace | None:
        """The pace from now on and its predicted cost; None while too few steps were measured.

        With the SLO "auto", this function chooses the pace.
        """
        if not self.engine.cost_model.knows_both_phases:
            return None
        auto = self.config.itl_slo_ms == "auto"
        return self._pacing.predict(self.choose_pace() if auto else Pace(self.config.slo_seconds))

    def choose_pace(self) -> Pace:
        """Choose the pace from the steps measured so far: the median of the last choices.

        If the machine is busy for a while, only one or two choices are affected.
        """
        self._paces.append(self._pacing.choose())
        pace = sorted(self._paces, key=lambda one: one.slo_seconds or 0.0)[
            (len(self._paces) - 1) // 2
        ]
        self.engine.keep_pace(pace)
        return pace

    @property
    def _pacing(self) -> Pacing:
        engine = self.engine
        config = self.config
        return Pacing(
            engine.cost_model,
            config.max_num_batched_tokens,
            config.max_model_len or 1,
            config.block_size,
        )

    def explain(
        self, request: RequestCounts, timeline: RequestTimeline, *, names: bool = False
    ) -> Explanation:
        """Explain a request's time, and what to change; `names` shows other requests' ids."""
        machine = Machine(
            self.config,
            self.engine.shape,
            self.engine.cost_model,
            measured_ceilings(self.config),
            self.units,
            cores=cores_of_each_engine() if self.config.backend == "cpu" else None,
            best_isa=device_of(self.config).best_isa,
            prompt_isa=self._prompt_isa,
            block_multiple=self.backend.block_multiple,
            kv_token_bytes={
                dtype: self.backend.kv_bytes_per_token(dtype)
                for dtype in self.backend.kv_cache_dtypes
            },
            slo_seconds=self.engine.scheduler.pace.slo_seconds,
        )
        return explain(request, timeline, machine, names=names)


def make_backend(
    config: EngineConfig, compile_progress: Callable[[float, int, str], None] | None = None
) -> Backend:
    """Make the configured backend; imported here because other backends need time or an extra."""
    if config.backend != "cpu" and config.kv_cache_dtype != "auto":
        raise InvalidRequestError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r} with the {config.backend} backend.",
            "It keeps the type that it computes in: use auto.",
        )
    if config.backend == "reference":
        from twinphase.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if config.backend == "torch":
        require_torch()
        from twinphase.backends.torch.opening import open_backend

        eager = (
            config.enforce_eager or config.tensor_parallel_size > 1
        )  # Collectives cannot be captured in a CUDA graph yet.
        return open_backend(
            config.device, config.dtype, config.rank_threads, eager, config.dequantize
        )
    from twinphase.backends.cpu.backend import CpuBackend

    backend: Backend = CpuBackend(
        threads=config.rank_threads,
        isa=config.isa,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        kv_cache_dtype=config.kv_cache_dtype,
        progress=compile_progress,
    )
    return backend


def make_engine(
    config: EngineConfig,
    model: Decoder,
    backend: Backend,
    shape: ModelShape,
    eos_token_ids: frozenset[int],
    heads: HiddenStateProposer | None = None,
) -> Engine:
    """Allocate the KV cache of a `backend` that holds `model`, and assemble an engine.

    `config` is resolved.
    """
    allocate_kv_cache(backend, model.blueprint, config)
    shape = replace(
        shape,
        kv_token_bytes=backend.kv_bytes_per_token(),
        state_bytes=model.blueprint.whole.state_bytes(STATE_LOG_ROWS),
    )
    prices = starting_prices(shape, measured_ceilings(config))
    cost_model = CostModel(prices, shape.windowed_share, shape.window)
    scheduler = Scheduler(
        config, cost_model, eos_token_ids=eos_token_ids, fingerprint=backend.kv_fingerprint
    )
    runner = Runner(model, backend, block_size=config.block_size, eos_token_ids=eos_token_ids)
    if heads is not None:
        runner.show_hidden(heads)
    recorder = StepRecorder(shape, cost_model, trace=_step_log(config, scheduler, cost_model))
    wanted = speculative_config(config.speculative_config)
    drafter = make_speculator(wanted, cost_model, lambda: scheduler.pace.slo_seconds, heads)
    sizes: dict[str, Any] = {"shape": shape, "vocab_size": model.blueprint.vocab_size}
    runner.first_step()
    return Engine(scheduler, runner, recorder, **sizes, seed=config.seed, drafter=drafter)


def allocate_kv_cache(backend: Backend, blueprint: Blueprint, config: EngineConfig) -> None:
    """Allocate the KV cache of a resolved configuration on `backend`."""
    if config.num_kv_blocks is None:
        raise ValueError("the configuration is not resolved")
    spec = KVCacheSpec.of(blueprint, config.num_kv_blocks, config.block_size)
    if blueprint.recurrent_layers:
        slots = config.num_state_slots or 0
        spec = replace(spec, num_state_slots=slots, state_log_rows=STATE_LOG_ROWS)
    backend.allocate_kv_cache(spec)


def _step_log(
    config: EngineConfig, scheduler: Scheduler, cost_model: CostModel
) -> TraceWriter | None:
    if config.trace_file is None:
        return None
    try:
        # The file stays open as long as the engine exists.
        file = open(config.trace_file, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise StorageError(
            f"Cannot write {config.trace_file}: {error.strerror}.", "Choose another --trace-file."
        ) from None
    return TraceWriter(file, trace_header(scheduler, cost_model))
