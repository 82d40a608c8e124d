"""The server's metrics for Prometheus: steps by phase, latencies, and requests' time.

Names are vLLM's after our own prefix, so that dashboards can be reused; docs/metrics.md defines
each one. Single requests are described by their timelines instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from twinphase.batch import StepTimes
from twinphase.engine.process.messages import StepStats
from twinphase.engine.process.status import WorkerStatus
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.timeline import IntervalKind

PREFIX = "twinphase:"
VLLM_PREFIX = "vllm:"
OPENMETRICS = "application/openmetrics-text"
# With any other escaping, the client library would replace the colon in names, which is not
# necessary.
OPENMETRICS_AS_IS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"
PHASES = ("prefill", "decode")
MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)

# Metrics with the same meaning in vLLM, except as noted in docs/metrics.md.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}


def _series(mantissas: Sequence[float], first: int, last: int) -> tuple[float, ...]:
    return tuple(
        float(f"{mantissa}e{power}") for power in range(first, last + 1) for mantissa in mantissas
    )


# Bucket bounds in seconds.
REQUEST_BUCKETS = (*_series((1, 2, 5), -3, 2), 1000.0)
GAP_BUCKETS = (
    *_series((1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8), -3, -1),
    *_series((1, 2, 5), 0, 1),
)
DELIVERY_BUCKETS = _series((1, 2, 5), -4, 0)
TOKEN_BUCKETS = _series((1, 2, 5), 0, 5)

# Gauges, and the attributes of `StepStats` that set them.
STEP_GAUGES = {
    "num_requests_running": ("num_running", "Requests with a share in the steps."),
    "num_requests_waiting": ("num_waiting", "Requests in the queue, preempted ones included."),
    "kv_cache_usage_perc": (
        "kv_cache_usage",
        "Blocks of the KV cache that requests hold, a fraction of 1.",
    ),
    "state_slots_usage_perc": (
        "state_usage",
        "Slots for recurrent states that requests hold, a fraction of 1; 0 without such layers.",
    ),
    "state_snapshots": ("num_snapshots", "Recurrent states that cached prefixes continue from."),
}
# Counters, and the attributes of `StepStats` that count since the engine's start.
ENGINE_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Times that a request lost its KV to others."),
    "spec_decode_num_failures": ("num_draft_failures", "Times that a source of drafts failed."),
}
# `StepStats` combines these names with a phase, such as `prefill_tokens`.
STEP_AMOUNTS = ("tokens", "seconds", "flops", "bytes")
STEP_PARTS = [part.name for part in fields(StepTimes)]
COUNTERS = {
    "engine_restarts": "Times that a dead engine was started again.",
    "rank_wait_seconds": "Time that rank 0 waited for other ranks.",
    "spec_decode_num_drafts": "Requests of steps that had drafts of their next tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens that were computed.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "prompt_tokens": "Prompt tokens of ended requests, cached ones included.",
    "prompt_tokens_cached": "Prompt tokens of ended requests that the prefix cache held.",
    "generation_tokens": "Output tokens handed to readers.",
    "reasoning_tokens": "Output tokens of ended requests that were reasoning.",
    "stall_seconds": "Added to decode steps by others' prefill chunks.",
    "batching_seconds": "Added to decode steps by others' decodes.",
    "unattributed_seconds": "Time of requests without a known cause.",
    "embedding_texts": "Texts of answered embedding requests, pairs of scoring requests.",
    "embedding_tokens": "Tokens of answered embedding and scoring requests.",
}
# Descriptions and labels of counters.
LABELLED_COUNTERS: dict[str, tuple[str, ...]] = {
    "step_tokens": ("Tokens computed in steps.", "phase"),
    "step_seconds": ("Time of steps, divided by the cost model.", "phase"),
    "step_flops": ("FLOP that the algorithm needs.", "phase"),
    "step_bytes": ("Bytes that the algorithm moves.", "phase"),
    "step_part_seconds": ("Time within steps by what was measured; parts may overlap.", "part"),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens that were accepted, by their position in the draft.",
        "position",
    ),
    "request_success": ("Requests that ended.", "finished_reason"),
    "requests_refused": ("Requests that were not taken.", "status", "reason"),
    "request_seconds": ("Time of ended requests, by what it was spent on.", "interval"),
    "worker_step_seconds": ("Time of a worker's steps, by phase.", "worker", "phase"),
    "worker_kv_blocks_received": (
        "KV blocks that others sent a worker, by the receiver's verdict.",
        "worker",
        "verdict",
    ),
}
TENANT_COUNTERS = {
    "tenant_work_seconds": ("Predicted time of steps, by tenant.", "tenant"),
    "tenant_requests_refused": ("Requests that met a full queue.", "tenant"),
}
# Counters with one of these labels have all their series from the start.
KNOWN_VALUES: dict[str, Sequence[str]] = {
    "phase": PHASES,
    "part": STEP_PARTS,
    "finished_reason": list(FinishReason),
    "interval": list(IntervalKind),
}
HISTOGRAMS = {
    "request_prompt_tokens": ("Prompt tokens of ended requests.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Output tokens of ended requests.", TOKEN_BUCKETS),
    "time_to_first_token_seconds": ("First output token handed over - arrival.", REQUEST_BUCKETS),
    "inter_token_latency_seconds": ("Each gap between consecutive output tokens.", GAP_BUCKETS),
    "request_time_per_output_token_seconds": (
        "(last token - first token) / (output tokens - 1), per request.",
        GAP_BUCKETS,
    ),
    "token_delivery_seconds": (
        "From the end of the step that made a token to the socket.",
        DELIVERY_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Last byte handed over - arrival.", REQUEST_BUCKETS),
    "request_queue_time_seconds": (
        "Time in the queue, again after each preemption.",
        REQUEST_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "prefill + prefill_wait + recompute, of requests that had any.",
        REQUEST_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "drafting + decode + rejected + batching + stall, of requests that had any.",
        REQUEST_BUCKETS,
    ),
    "embedding_request_seconds": (
        "Last byte handed over - arrival, of answered embedding and scoring requests.",
        REQUEST_BUCKETS,
    ),
}
PHASE_HISTOGRAMS = {
    "request_prefill_time_seconds": PREFILL_KINDS,
    "request_decode_time_seconds": DECODE_KINDS,
}
# Gauges and counters by worker, and the attributes of `WorkerStatus` that set them.
WORKER_GAUGES = {
    "worker_up": ("is_ready", "Whether a worker takes requests."),
    "worker_requests_running": ("running", "Requests that run at a worker."),
    "worker_requests_waiting": ("waiting", "Requests that wait at a worker."),
    "worker_kv_cache_usage_perc": ("kv_cache_usage", "Fraction of a worker's blocks in use."),
    "worker_kv_transfers": ("transfers", "Requests whose KV blocks are being transferred."),
}
WORKER_COUNTERS = {
    "worker_first_token_mismatches": (
        "first_token_mismatches",
        "First tokens of a worker that another one computed otherwise.",
    ),
    "worker_kv_blocks_sent": (
        "blocks_sent",
        "KV blocks of prompts that a worker computed for others, and that arrived.",
    ),
    "worker_kv_bytes_sent": ("bytes_sent", "Bytes of KV blocks that a worker sent."),
}


def _alias(family: Metric) -> Metric:
    """The same samples under vLLM's name, with vLLM's label for the engine."""
    alias = Metric(
        VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type
    )
    for sample in family.samples:
        name = VLLM_PREFIX + sample.name.removeprefix(PREFIX)
        alias.samples.append(Sample(name, {**sample.labels, "engine": "0"}, sample.value))
    return alias


class _WithoutTenants:
    """The metrics that need no key."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        start = f"{PREFIX}tenant_"
        return (one for one in self._metrics.collect() if not one.name.startswith(start))


class Metrics:
    """All metrics of a server; any thread may call it.

    Prometheus' client collects them from this object, which labels each sample with the model's
    name.
    """

    def __init__(
        self,
        model_name: str,
        *,
        vllm_aliases: bool = False,
        tenants: Mapping[str, float] | None = None,
    ) -> None:
        """`tenants`: weights by name; if empty, there are no metrics by tenant."""
        self._model_name = model_name
        self._vllm_aliases = vllm_aliases
        self._tenants = tenants or {}
        self._made: list[Counter | Gauge | Histogram] = []
        self._seen: dict[tuple[str, ...], float] = {}  # Last totals by metric and labels.
        self._workers: set[str] = set()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._up = self._make(Gauge, "engine_up", "1 while the engine takes requests.")
        self._itl_slo = self._make(
            Gauge,
            "itl_slo_seconds",
            "Gap between tokens that running answers are to keep; absent while unknown.",
        )
        self._chunk = self._make(
            Gauge,
            "prefill_chunk_tokens",
            "Prompt tokens that a step beside one decode has room for; absent while unknown.",
        )
        for limit in (self._itl_slo, self._chunk):
            limit.set(math.nan)
        self._ceilings = self._make(
            Gauge, "ceiling_per_second", "What the machine was measured to do at best.", "of"
        )
        self._gauges = {
            name: self._make(Gauge, name, text, *labels)
            for table, labels in ((STEP_GAUGES, ()), (WORKER_GAUGES, ("worker",)))
            for name, (_, text) in table.items()
        }
        counters = {name: (text,) for name, text in COUNTERS.items()} | LABELLED_COUNTERS
        counters |= {name: (text,) for name, (_, text) in ENGINE_COUNTERS.items()}
        counters |= {name: (text, "worker") for name, (_, text) in WORKER_COUNTERS.items()}
        if tenants:
            counters |= TENANT_COUNTERS
            weights = self._make(
                Gauge, "tenant_weight", "Share of a tenant beside others.", "tenant"
            )
            for tenant, weight in tenants.items():
                weights.labels(tenant).set(weight)
        self._counters = {
            name: self._make(Counter, name, *texts) for name, texts in counters.items()
        }
        known_values = KNOWN_VALUES | {"tenant": list(self._tenants)}
        for name, (_, *labels) in counters.items():
            for value in known_values.get(labels[0], ()) if len(labels) == 1 else ():
                self._counters[name].labels(value)
        self._histograms = {
            name: self._make(Histogram, name, text, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def _make(
        self, metric_type: type[MetricT], name: str, text: str, *labels: str, **options: Any
    ) -> MetricT:
        metric = metric_type(PREFIX + name, text, labels, registry=None, **options)
        self._made.append(metric)
        return metric

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now, for Prometheus' client."""
        for family in (family for metric in self._made for family in metric.collect()):
            # Each series would otherwise have a second one with the time of its creation.
            family.samples = [
                sample._replace(labels={"model_name": self._model_name, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created") and not math.isnan(sample.value)
            ]
            yield family
            if self._vllm_aliases and family.name.removeprefix(PREFIX) in VLLM_NAMES:
                yield _alias(family)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _raise_to(self, name: str, total: float, *labels: str) -> None:
        """Increase a counter to a total; if the total shrank, it had restarted at zero."""
        seen = self._seen.get((name, *labels), 0.0)
        self._add(name, total - seen if total >= seen else total, *labels)
        self._seen[name, *labels] = total

    def step(self, stats: StepStats) -> None:
        for name, (attribute, _) in STEP_GAUGES.items():
            self._gauges[name].set(getattr(stats, attribute))
        self._itl_slo.set(math.nan if stats.itl_slo_seconds is None else stats.itl_slo_seconds)
        self._chunk.set(math.nan if stats.chunk_tokens is None else stats.chunk_tokens)
        for name, (attribute, _) in ENGINE_COUNTERS.items():
            self._raise_to(name, getattr(stats, attribute))
        for tenant in stats.work.keys() & self._tenants.keys():
            self._add("tenant_work_seconds", stats.work[tenant], tenant)
        for amount in STEP_AMOUNTS:
            for phase in PHASES:
                self._add(f"step_{amount}", getattr(stats, f"{phase}_{amount}"), phase)
        for part in STEP_PARTS:
            self._add("step_part_seconds", getattr(stats.times, part), part)
        self._add("rank_wait_seconds", stats.times.rank_wait)
        self._add("spec_decode_num_drafts", stats.num_drafts)
        self._add("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self._add("spec_decode_num_accepted_tokens", sum(stats.accepted))
        for position, count in enumerate(stats.accepted):
            self._add("spec_decode_num_accepted_tokens_per_pos", count, str(position))

    def limits(self, worker: WorkerStatus) -> None:
        """Set the present limits of an engine."""
        for of, rate in (worker.ceilings or {}).items():
            if rate is not None:
                self._ceilings.labels(of).set(rate)

    def workers(self, workers: Sequence[WorkerStatus]) -> None:
        """Set the present values of a router's engines; `workers` is empty for a single engine."""
        for worker in workers:
            for name, (attribute, _) in WORKER_GAUGES.items():
                self._gauges[name].labels(worker.id).set(getattr(worker, attribute))
            for name, (attribute, _) in WORKER_COUNTERS.items():
                self._raise_to(name, getattr(worker, attribute), worker.id)
            for phase in PHASES:
                seconds = getattr(worker, f"{phase}_seconds")
                self._raise_to("worker_step_seconds", seconds, worker.id, phase)
            for verdict, count in worker.blocks_received.items():
                self._raise_to("worker_kv_blocks_received", count, worker.id, verdict)
        ids = {worker.id for worker in workers}
        for gone in self._workers - ids:
            for name in WORKER_GAUGES:
                self._gauges[name].labels(gone).set(0)
        self._workers |= ids

    def engine_up(self, is_up: bool) -> None:
        """Note whether the engine takes requests; a dead engine holds none."""
        self._up.set(is_up)
        if not is_up:
            self.idle()

    def idle(self) -> None:
        """Note that the engine has no requests, since it makes no step that would report this."""
        for name in STEP_GAUGES:
            self._gauges[name].set(0)

    def engine_restarted(self, *, totals_last: bool = False) -> None:
        """Note an engine's restart; its totals restarted at zero unless `totals_last`."""
        self._add("engine_restarts", 1)
        if not totals_last:
            self._seen.clear()
        self.engine_up(True)

    def first_token(self, seconds: float) -> None:
        """Note that a request's first output token was delivered `seconds` after its arrival."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._add("generation_tokens", 1)

    def token_gap(self, seconds: float, count: int = 1) -> None:
        """Note that `count` tokens were sent together, `seconds` after the previous token.

        The gap is not divided: gaps between tokens that were sent together are zero, as in
        `RequestTimeline.itl`.
        """
        gaps = self._histograms["inter_token_latency_seconds"]
        gaps.observe(seconds)
        for _ in range(count - 1):
            gaps.observe(0.0)
        self._add("generation_tokens", count)

    def delivered(self, seconds: float) -> None:
        """Note that tokens were written to the socket `seconds` after the end of their step."""
        self._histograms["token_delivery_seconds"].observe(seconds)

    def ended(self, record: RequestRecord, num_reasoning_tokens: int) -> None:
        """Note that a request has ended, for any reason.

        An abandoned request is only counted, because only the engine knows its times.
        """
        self._add("request_success", 1, record.finish_reason or FinishReason.ABORT)
        if not record.has_ended:
            return
        timeline = record.timeline
        counts = record.counts
        self._add("prompt_tokens", counts.num_prompt_tokens)
        self._add("prompt_tokens_cached", counts.num_cached_tokens)
        self._add("reasoning_tokens", num_reasoning_tokens)
        seconds = timeline.totals()
        values = {
            "request_prompt_tokens": counts.num_prompt_tokens,
            "request_generation_tokens": counts.num_output_tokens,
            "e2e_request_latency_seconds": timeline.end - timeline.arrival,
            "request_queue_time_seconds": seconds[IntervalKind.QUEUE],
            "request_time_per_output_token_seconds": timeline.tpot,
        }
        for name, kinds in PHASE_HISTOGRAMS.items():
            values[name] = sum(seconds[kind] for kind in kinds) or None
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)
        for kind, amount in seconds.items():
            self._add("request_seconds", amount, kind)
        for kind in (IntervalKind.STALL, IntervalKind.BATCHING, IntervalKind.UNATTRIBUTED):
            self._add(f"{kind}_seconds", seconds[kind])

    def embedded(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """Note that an embedding request was answered, `seconds` after its arrival."""
        self._add("embedding_texts", num_texts)
        self._add("embedding_tokens", num_tokens)
        self._histograms["embedding_request_seconds"].observe(seconds)

    def refused(self, status: int, reason: str, tenant: str = "") -> None:
        """Note that a request was refused before it was queued; `tenant` has a full queue.

        `reason` is one of a few fixed words, never text from a request, because each one creates a
        permanent series.
        """
        if tenant in self._tenants:
            self._add("tenant_requests_refused", 1, tenant)
        self._add("requests_refused", 1, str(status), reason)

    def expose(self, accept: str | None, *, tenants: bool = True) -> tuple[bytes, str]:
        """Metrics as text, and the content type: OpenMetrics if the Accept header allows it.

        `tenants`: whether to include metrics that name tenants.
        """
        # The header itself is not passed on, because an invalid version number in it raises an
        # error.
        encode, content_type = choose_encoder(
            OPENMETRICS_AS_IS if OPENMETRICS in (accept or "") else ""
        )
        registry: Any = self.registry if tenants else _WithoutTenants(self)
        return encode(registry), content_type
