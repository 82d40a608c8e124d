"""What the server counts, for Prometheus: steps by phase, latencies, and where requests' time went.

Names are vLLM's after a prefix of our own, so that dashboards carry over; docs/metrics.md defines
each. Not for HTTP, and not for one request's story: that is its timeline's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from twinphase.batch import StepTimes
from twinphase.engine.process.messages import StepStats
from twinphase.engine.process.status import WorkerStatus
from twinphase.outcome import FinishReason
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts

PREFIX = "twinphase:"
VLLM_PREFIX = "vllm:"
OPENMETRICS = "application/openmetrics-text"
# Asked for any other escaping, the client puts an underscore for the colon of a sample's name,
# which needs none.
OPENMETRICS_AS_IS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"
PHASES = ("prefill", "decode")

# Metrics that vLLM has too, with the same meaning except as docs/metrics.md notes.
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


# In seconds.
REQUEST_BUCKETS = (*_series((1, 2, 5), -3, 2), 1000.0)
GAP_BUCKETS = (
    *_series((1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8), -3, -1),
    *_series((1, 2, 5), 0, 1),
)
DELIVERY_BUCKETS = _series((1, 2, 5), -4, 0)
TOKEN_BUCKETS = _series((1, 2, 5), 0, 5)

# Gauges and the attributes of `StepStats` that set them.
STEP_GAUGES = {
    "num_requests_running": ("num_running", "Requests with a share in the steps."),
    "num_requests_waiting": ("num_waiting", "Requests in the queue, preempted ones included."),
    "kv_cache_usage_perc": (
        "kv_cache_usage",
        "Blocks of the KV cache that requests hold, a fraction of 1.",
    ),
}
# Counters and the attributes of `StepStats` that count since the engine's start.
ENGINE_COUNTERS = {
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Times that a request lost its KV to others."),
    "spec_decode_num_failures": ("num_draft_failures", "Times that a source of drafts failed."),
}
# Counters by phase; `StepStats` has an attribute of both names, such as `prefill_tokens`.
PHASE_COUNTERS = {
    "tokens": "Tokens computed in steps.",
    "seconds": "Time of steps, divided by the cost model.",
    "flops": "FLOP that the algorithm needs.",
    "bytes": "Bytes that the algorithm moves.",
}
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
    "embedding_texts": "Texts of answered embedding requests.",
    "embedding_tokens": "Tokens of answered embedding requests.",
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
        "Last byte handed over - arrival, of answered embedding requests.",
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


class _Families:
    """The metrics of one model, which Prometheus' client collects from here."""

    def __init__(self, model_name: str, vllm_aliases: bool) -> None:
        self.model_name = model_name
        self._vllm_aliases = vllm_aliases
        self._made: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str) -> Counter:
        return self.counter_by(name, text).labels(self.model_name)

    def counter_by(self, name: str, text: str, *labels: str) -> Counter:
        """Without its children: their labels are the model's name and `labels`."""
        counter = Counter(PREFIX + name, text, ("model_name", *labels), registry=None)
        self._made.append(counter)
        return counter

    def counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """A child for each value, so that all are there from the start and cheap to reach."""
        counter = self.counter_by(name, text, label)
        return {value: counter.labels(self.model_name, value) for value in values}

    def gauge(self, name: str, text: str) -> Gauge:
        return self.gauge_by(name, text).labels(self.model_name)

    def gauge_by(self, name: str, text: str, *labels: str) -> Gauge:
        gauge = Gauge(PREFIX + name, text, ("model_name", *labels), registry=None)
        self._made.append(gauge)
        return gauge

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), registry=None, buckets=buckets)
        self._made.append(histogram)
        return histogram.labels(self.model_name)

    def collect(self) -> Iterator[Metric]:
        families = [family for made in self._made for family in made.collect()]
        for family in families:
            # A series more for every child, which says only when the server started.
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
        yield from families
        for family in families if self._vllm_aliases else ():
            if family.name.removeprefix(PREFIX) in VLLM_NAMES:
                yield _alias(family)


def _alias(family: Metric) -> Metric:
    """The same samples under vLLM's name, with the label that distinguishes its engines."""
    alias = Metric(
        VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type
    )
    for sample in family.samples:
        name = VLLM_PREFIX + sample.name.removeprefix(PREFIX)
        alias.samples.append(Sample(name, {**sample.labels, "engine": "0"}, sample.value))
    return alias


class Metrics:
    """All metrics of a server; may be called from any thread."""

    def __init__(
        self,
        model_name: str,
        *,
        vllm_aliases: bool = False,
        tenants: Mapping[str, float] | None = None,
    ) -> None:
        """`tenants`: weights by name; without any there are no metrics by tenant."""
        self.registry = CollectorRegistry()
        self._families = of = _Families(model_name, vllm_aliases)
        self.registry.register(of)
        self._up = of.gauge("engine_up", "1 while the engine takes requests.")
        self._gauges = {name: of.gauge(name, text) for name, (_, text) in STEP_GAUGES.items()}
        totals = {name: text for name, (_, text) in ENGINE_COUNTERS.items()}
        self._counters = {
            name: of.counter(name, text) for name, text in (COUNTERS | totals).items()
        }
        self._seen = dict.fromkeys(totals, 0)
        self._by_phase = {
            name: of.counters(f"step_{name}", text, "phase", PHASES)
            for name, text in PHASE_COUNTERS.items()
        }
        self._histograms = {
            name: of.histogram(name, text, buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        parts = [part.name for part in fields(StepTimes)]
        text = "Time within steps by what was measured; parts may overlap."
        self._step_parts = of.counters("step_part_seconds", text, "part", parts)
        text = "Draft tokens that were accepted, by their position in the draft."
        self._accepted_at = of.counter_by(
            "spec_decode_num_accepted_tokens_per_pos", text, "position"
        )
        reasons = [reason.value for reason in FinishReason]
        text = "Requests that ended."
        self._success = of.counters("request_success", text, "finished_reason", reasons)
        text = "Requests that were not taken."
        self._refused = of.counter_by("requests_refused", text, "status", "reason")
        kinds = [kind.value for kind in IntervalKind]
        text = "Time of ended requests, by what it was spent on."
        self._seconds = of.counters("request_seconds", text, "interval", kinds)
        self._make_worker_metrics(of)
        self._tenant_work = self._tenant_refused = dict[str, Counter]()
        if tenants:
            self._make_tenant_metrics(of, tenants)

    def _make_worker_metrics(self, of: _Families) -> None:
        by = "worker"
        self._worker_gauges = {
            name: of.gauge_by(name, text, by) for name, (_, text) in WORKER_GAUGES.items()
        }
        self._worker_counters = {
            name: of.counter_by(name, text, by) for name, (_, text) in WORKER_COUNTERS.items()
        }
        text = "Time of a worker's steps, by phase."
        self._worker_seconds = of.counter_by("worker_step_seconds", text, by, "phase")
        text = "KV blocks that others sent a worker, by the receiver's verdict."
        self._worker_received = of.counter_by("worker_kv_blocks_received", text, by, "verdict")
        self._worker_totals: dict[tuple[object, ...], float] = {}
        self._workers: set[str] = set()

    def _make_tenant_metrics(self, of: _Families, tenants: Mapping[str, float]) -> None:
        by = "tenant", list(tenants)
        text = "Predicted time of steps, by tenant."
        self._tenant_work = of.counters("tenant_work_seconds", text, *by)
        text = "Requests that met a full queue."
        self._tenant_refused = of.counters("tenant_requests_refused", text, *by)
        weights = of.gauge_by("tenant_weight", "Share of a tenant beside others.", "tenant")
        for name, weight in tenants.items():
            weights.labels(of.model_name, name).set(weight)

    def step(self, stats: StepStats) -> None:
        for name, (attribute, _) in STEP_GAUGES.items():
            self._gauges[name].set(getattr(stats, attribute))
        for tenant, seconds in stats.work.items():
            if tenant in self._tenant_work:
                self._tenant_work[tenant].inc(seconds)
        for name, (attribute, _) in ENGINE_COUNTERS.items():
            total = getattr(stats, attribute)
            seen = self._seen[name]
            self._counters[name].inc(total - seen if total >= seen else total)
            self._seen[name] = total
        for name, counters in self._by_phase.items():
            for phase, counter in counters.items():
                counter.inc(getattr(stats, f"{phase}_{name}"))
        self._counters["rank_wait_seconds"].inc(stats.times.rank_wait)
        for part, counter in self._step_parts.items():
            counter.inc(getattr(stats.times, part))
        self._counters["spec_decode_num_drafts"].inc(stats.num_drafts)
        self._counters["spec_decode_num_draft_tokens"].inc(stats.num_draft_tokens)
        self._counters["spec_decode_num_accepted_tokens"].inc(sum(stats.accepted))
        for position, count in enumerate(stats.accepted):
            self._accepted_at.labels(self._families.model_name, position).inc(count)

    def workers(self, found: Sequence[WorkerStatus]) -> None:
        """The engines of a router, as they are now; empty for a single engine."""
        model = self._families.model_name
        for worker in found:
            for name, gauge in self._worker_gauges.items():
                gauge.labels(model, worker.id).set(getattr(worker, WORKER_GAUGES[name][0]))
            totals: list[tuple[Counter, tuple[str, ...], float]] = [
                (self._worker_seconds, (worker.id, "prefill"), worker.prefill_seconds),
                (self._worker_seconds, (worker.id, "decode"), worker.decode_seconds),
            ]
            totals += [
                (counter, (worker.id,), getattr(worker, WORKER_COUNTERS[name][0]))
                for name, counter in self._worker_counters.items()
            ]
            totals += [
                (self._worker_received, (worker.id, verdict), count)
                for verdict, count in worker.blocks_received.items()
            ]
            for counter, labels, total in totals:
                key = counter, *labels
                counter.labels(model, *labels).inc(total - self._worker_totals.get(key, 0.0))
                self._worker_totals[key] = total
        ids = {worker.id for worker in found}
        for gone in self._workers - ids:
            for gauge in self._worker_gauges.values():
                gauge.labels(model, gone).set(0)
        self._workers |= ids

    def engine_up(self, is_up: bool) -> None:
        """Whether the engine takes requests; a dead engine holds none."""
        self._up.set(is_up)
        if not is_up:
            self.idle()

    def idle(self) -> None:
        """The engine has no request, and so makes no step to report it."""
        for gauge in self._gauges.values():
            gauge.set(0)

    def engine_restarted(self, *, totals_last: bool = False) -> None:
        """A dead engine was restarted; its totals began at zero again, unless `totals_last`."""
        self._counters["engine_restarts"].inc()
        if not totals_last:
            self._seen = dict.fromkeys(self._seen, 0)
        self.engine_up(True)

    def first_token(self, seconds: float) -> None:
        """A request's first output token was handed over, `seconds` after its arrival."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._counters["generation_tokens"].inc()

    def token_gap(self, seconds: float, count: int = 1) -> None:
        """`count` further tokens of a request were sent together, `seconds` after the one before.

        Never divided: the gaps between tokens that came together are zero, as in
        `RequestTimeline.itl`.
        """
        gaps = self._histograms["inter_token_latency_seconds"]
        gaps.observe(seconds)
        for _ in range(count - 1):
            gaps.observe(0.0)
        self._counters["generation_tokens"].inc(count)

    def delivered(self, seconds: float) -> None:
        """Tokens were handed to the socket, `seconds` after the end of the step that made them."""
        self._histograms["token_delivery_seconds"].observe(seconds)

    def finished(
        self,
        timeline: RequestTimeline,
        counts: RequestCounts,
        reason: FinishReason,
        num_reasoning_tokens: int = 0,
    ) -> None:
        """A request has ended, for any reason."""
        self._success[reason.value].inc()
        self._counters["prompt_tokens"].inc(counts.num_prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(counts.num_cached_tokens)
        self._counters["reasoning_tokens"].inc(num_reasoning_tokens)
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
            self._seconds[kind].inc(amount)
        for kind in (IntervalKind.STALL, IntervalKind.BATCHING, IntervalKind.UNATTRIBUTED):
            self._counters[f"{kind.value}_seconds"].inc(seconds[kind])

    def embedded(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """An embedding request was answered, `seconds` after its arrival."""
        self._counters["embedding_texts"].inc(num_texts)
        self._counters["embedding_tokens"].inc(num_tokens)
        self._histograms["embedding_request_seconds"].observe(seconds)

    def aborted(self) -> None:
        """A request was given up before its end; only the engine knew where its time went."""
        self._success[FinishReason.ABORT.value].inc()

    def refused(self, status: int, reason: str, tenant: str = "") -> None:
        """A request was refused before it was queued; `tenant`: whose queue was full.

        `reason` is one of the server's few words, never text from a request: each makes a series
        for good.
        """
        if tenant in self._tenant_refused:
            self._tenant_refused[tenant].inc()
        self._refused.labels(self._families.model_name, str(status), reason).inc()

    def expose(self, accept: str | None) -> tuple[bytes, str]:
        """All metrics as text, and its content type: OpenMetrics if the Accept header names it."""
        # Not the header itself: a version in it that is no number raises.
        encode, content_type = choose_encoder(
            OPENMETRICS_AS_IS if OPENMETRICS in (accept or "") else ""
        )
        return encode(self.registry), content_type
