"""What the server counts, for Prometheus: steps by phase, latencies, and where requests' time went.

Names are vLLM's behind a prefix of our own, so that dashboards carry over; docs/metrics.md defines
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

# Those of our metrics that vLLM has, with the same meaning but for what docs/metrics.md notes.
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


REQUEST_BUCKETS = (*_series((1, 2, 5), -3, 2), 1000.0)  # seconds, as the next two
GAP_BUCKETS = (
    *_series((1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8), -3, -1),
    *_series((1, 2, 5), 0, 1),
)
DELIVERY_BUCKETS = _series((1, 2, 5), -4, 0)
TOKEN_BUCKETS = _series((1, 2, 5), 0, 5)


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
    """The same samples under vLLM's name, with the label that tells its engines apart."""
    alias = Metric(
        VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type
    )
    for sample in family.samples:
        name = VLLM_PREFIX + sample.name.removeprefix(PREFIX)
        alias.samples.append(Sample(name, {**sample.labels, "engine": "0"}, sample.value))
    return alias


class Metrics:
    """Counts what it is told; from any thread."""

    def __init__(
        self,
        model_name: str,
        *,
        vllm_aliases: bool = False,
        tenants: Mapping[str, float] | None = None,
    ) -> None:
        """`tenants`: weights by name; without any there are no metrics by tenant."""
        self.registry = CollectorRegistry()
        self._families = families = _Families(model_name, vllm_aliases)
        self.registry.register(families)
        self._make_step_metrics(families)
        self._make_request_metrics(families)
        self._make_tenant_metrics(families, tenants or {})
        self._make_worker_metrics(families)

    def _make_step_metrics(self, of: _Families) -> None:
        self._up = of.gauge("engine_up", "1 while the engine takes requests.")
        self._restarts = of.counter(
            "engine_restarts", "Times that a dead engine was started again."
        )
        self._running = of.gauge("num_requests_running", "Requests with a share in the steps.")
        self._waiting = of.gauge(
            "num_requests_waiting", "Requests in the queue, preempted ones included."
        )
        self._kv_usage = of.gauge(
            "kv_cache_usage_perc", "Blocks of the KV cache that requests hold, a fraction of 1."
        )
        self._since_start = {
            "prefix_queries": of.counter(
                "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
            ),
            "prefix_hits": of.counter(
                "prefix_cache_hits", "Prompt tokens found in the prefix cache."
            ),
            "num_preemptions": of.counter(
                "num_preemptions", "Times that a request lost its KV to others."
            ),
            "num_draft_failures": of.counter(
                "spec_decode_num_failures", "Times that a source of guesses failed."
            ),
        }
        self._seen = dict.fromkeys(self._since_start, 0)
        text = "Requests of steps that had guesses at their next tokens."
        self._drafts = of.counter("spec_decode_num_drafts", text)
        self._draft_tokens = of.counter(
            "spec_decode_num_draft_tokens", "Guesses that were computed."
        )
        self._accepted_tokens = of.counter(
            "spec_decode_num_accepted_tokens", "Those of them that were right."
        )
        text = "The same by their position among the guesses of a step."
        self._accepted_at = of.counter_by(
            "spec_decode_num_accepted_tokens_per_pos", text, "position"
        )
        by = "phase", PHASES
        self._step_tokens = of.counters("step_tokens", "Tokens computed in steps.", *by)
        self._step_seconds = of.counters(
            "step_seconds", "Time of steps, divided by the cost model.", *by
        )
        self._rank_wait = of.counter(
            "rank_wait_seconds", "Time of steps in which rank 0 waited for other ranks."
        )
        self._step_parts = of.counters(
            "step_part_seconds",
            "Time within steps by what was measured; parts may overlap.",
            "part",
            [part.name for part in fields(StepTimes)],
        )
        self._step_flops = of.counters("step_flops", "FLOP that the algorithm needs.", *by)
        self._step_bytes = of.counters("step_bytes", "Bytes that the algorithm moves.", *by)

    def _make_request_metrics(self, of: _Families) -> None:
        self._prompt_tokens = of.counter(
            "prompt_tokens", "Prompt tokens of ended requests, cached ones included."
        )
        self._cached_tokens = of.counter(
            "prompt_tokens_cached", "Those of them that the prefix cache held."
        )
        self._output_tokens = of.counter("generation_tokens", "Output tokens handed to readers.")
        self._reasoning_tokens = of.counter(
            "reasoning_tokens", "Output tokens of ended requests that were reasoning."
        )
        reasons = [reason.value for reason in FinishReason]
        self._success = of.counters(
            "request_success", "Requests that ended.", "finished_reason", reasons
        )
        self._refused = of.counter_by(
            "requests_refused", "Requests that were not taken.", "status", "reason"
        )

        text = "Token counts of ended requests."
        self._request_prompt_tokens = of.histogram("request_prompt_tokens", text, TOKEN_BUCKETS)
        self._request_output_tokens = of.histogram("request_generation_tokens", text, TOKEN_BUCKETS)

        text = "First output token handed over - arrival."
        self._ttft = of.histogram("time_to_first_token_seconds", text, REQUEST_BUCKETS)
        text = "Each gap between consecutive output tokens."
        self._gap = of.histogram("inter_token_latency_seconds", text, GAP_BUCKETS)
        text = "(last token - first token) / (output tokens - 1), per request."
        self._tpot = of.histogram("request_time_per_output_token_seconds", text, GAP_BUCKETS)
        text = "From the end of the step that made a token to the socket."
        self._delivery = of.histogram("token_delivery_seconds", text, DELIVERY_BUCKETS)
        text = "Last byte handed over - arrival."
        self._e2e = of.histogram("e2e_request_latency_seconds", text, REQUEST_BUCKETS)
        text = "Time in the queue, again after each preemption."
        self._queue_time = of.histogram("request_queue_time_seconds", text, REQUEST_BUCKETS)
        text = "prefill + prefill_wait + recompute, of requests that had any."
        self._prefill_time = of.histogram("request_prefill_time_seconds", text, REQUEST_BUCKETS)
        text = "drafting + decode + rejected + batching + stall, of requests that had any."
        self._decode_time = of.histogram("request_decode_time_seconds", text, REQUEST_BUCKETS)

        text = "Time of ended requests, by what it was spent on."
        self._seconds = of.counters(
            "request_seconds", text, "interval", [kind.value for kind in IntervalKind]
        )
        self._seconds_apart = {
            IntervalKind.STALL: of.counter(
                "stall_seconds", "Added to decode steps by others' prefill chunks."
            ),
            IntervalKind.BATCHING: of.counter(
                "batching_seconds", "Added to decode steps by others' decodes."
            ),
            IntervalKind.UNATTRIBUTED: of.counter(
                "unattributed_seconds", "Time of requests that nothing names."
            ),
        }

        self._texts = of.counter("embedding_texts", "Texts of answered embedding requests.")
        self._text_tokens = of.counter("embedding_tokens", "Their tokens.")
        text = "Last byte handed over - arrival, of answered embedding requests."
        self._embedding_seconds = of.histogram("embedding_request_seconds", text, REQUEST_BUCKETS)

    def _make_worker_metrics(self, of: _Families) -> None:
        by = "worker"
        self._worker_up = of.gauge_by("worker_up", "Whether a worker takes requests.", by)
        self._worker_running = of.gauge_by(
            "worker_requests_running", "Requests that run at a worker.", by
        )
        self._worker_waiting = of.gauge_by(
            "worker_requests_waiting", "Requests that wait at a worker.", by
        )
        self._worker_usage = of.gauge_by(
            "worker_kv_cache_usage_perc", "Fraction of its blocks that are held.", by
        )
        self._worker_seconds = of.counter_by(
            "worker_step_seconds", "Time of a worker's steps, by phase.", by, "phase"
        )
        text = "First tokens of a worker that another one computed otherwise."
        self._worker_mismatches = of.counter_by("worker_first_token_mismatches", text, by)
        text = "KV blocks of prompts that a worker read for others, and that are there."
        self._worker_sent = of.counter_by("worker_kv_blocks_sent", text, by)
        self._worker_bytes = of.counter_by(
            "worker_kv_bytes_sent", "Bytes of KV blocks that a worker sent.", by
        )
        text = "KV blocks that others sent a worker, by what became of them."
        self._worker_received = of.counter_by("worker_kv_blocks_received", text, by, "verdict")
        self._worker_transfers = of.gauge_by(
            "worker_kv_transfers", "Requests whose KV blocks are on their way.", by
        )
        self._worker_known: dict[tuple[object, ...], float] = {}
        self._workers: set[str] = set()

    def _make_tenant_metrics(self, of: _Families, tenants: Mapping[str, float]) -> None:
        names = list(tenants)
        by = "tenant"
        if not names:
            self._tenant_work = self._tenant_refused = dict[str, Counter]()
            return
        self._tenant_work = of.counters(
            "tenant_work_seconds", "Predicted time of steps, by tenant.", by, names
        )
        self._tenant_refused = of.counters(
            "tenant_requests_refused", "Requests that met a full queue.", by, names
        )
        weights = of.gauge_by("tenant_weight", "Share of a tenant beside others.", by)
        for name, weight in tenants.items():
            weights.labels(of.model_name, name).set(weight)

    def step(self, stats: StepStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        for tenant, seconds in stats.work.items():
            if tenant in self._tenant_work:
                self._tenant_work[tenant].inc(seconds)
        for name, counter in self._since_start.items():
            total = getattr(stats, name)
            counter.inc(total - self._seen[name] if total >= self._seen[name] else total)
            self._seen[name] = total
        for counters, prefill, decode in (
            (self._step_tokens, stats.prefill_tokens, stats.decode_tokens),
            (self._step_seconds, stats.prefill_seconds, stats.decode_seconds),
            (self._step_flops, stats.prefill_flops, stats.decode_flops),
            (self._step_bytes, stats.prefill_bytes, stats.decode_bytes),
        ):
            counters["prefill"].inc(prefill)
            counters["decode"].inc(decode)

        self._rank_wait.inc(stats.times.rank_wait)
        for part, counter in self._step_parts.items():
            counter.inc(getattr(stats.times, part))
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(sum(stats.accepted))
        for position, count in enumerate(stats.accepted):
            self._accepted_at.labels(self._families.model_name, position).inc(count)

    def workers(self, found: Sequence[WorkerStatus]) -> None:
        """The engines behind a router, as they are now; nothing for a lone engine."""
        model = self._families.model_name
        for one in found:
            self._worker_up.labels(model, one.id).set(one.state == "ready")
            self._worker_running.labels(model, one.id).set(one.running)
            self._worker_waiting.labels(model, one.id).set(one.waiting)
            self._worker_usage.labels(model, one.id).set(one.kv_cache_usage)
            self._worker_transfers.labels(model, one.id).set(one.transfers)
            for counter, labels, total in (
                (self._worker_seconds, (one.id, "prefill"), one.prefill_seconds),
                (self._worker_seconds, (one.id, "decode"), one.decode_seconds),
                (self._worker_mismatches, (one.id,), one.first_token_mismatches),
                (self._worker_sent, (one.id,), one.blocks_sent),
                (self._worker_bytes, (one.id,), one.bytes_sent),
                *(
                    (self._worker_received, (one.id, key), count)
                    for key, count in one.blocks_received.items()
                ),
            ):
                known = counter, *labels
                counter.labels(model, *labels).inc(total - self._worker_known.get(known, 0.0))
                self._worker_known[known] = total
        for gone in self._workers - {one.id for one in found}:
            for gauge in (
                self._worker_up,
                self._worker_running,
                self._worker_waiting,
                self._worker_usage,
            ):
                gauge.labels(model, gone).set(0)
        self._workers |= {one.id for one in found}

    def engine_up(self, is_up: bool) -> None:
        """Whether the engine takes requests; what it held died with it."""
        self._up.set(is_up)
        if not is_up:
            self.idle()

    def idle(self) -> None:
        """The engine has no request; it makes no step that would say so."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.set(0)

    def engine_restarted(self, *, totals_last: bool = False) -> None:
        """A dead engine was started again and takes requests; its totals began at zero, unless they last."""
        self._restarts.inc()
        if not totals_last:
            self._seen = dict.fromkeys(self._since_start, 0)
        self.engine_up(True)

    def first_token(self, seconds: float) -> None:
        """A request's first output token was handed over, `seconds` after its arrival."""
        self._ttft.observe(seconds)
        self._output_tokens.inc()

    def token_gap(self, seconds: float, count: int = 1) -> None:
        """`count` further tokens of a request were handed over together, `seconds` after the one before them.

        Never divided: the gaps between those of them that came together are zero, as in
        `RequestTimeline.itl`.
        """
        self._gap.observe(seconds)
        for _ in range(count - 1):
            self._gap.observe(0.0)
        self._output_tokens.inc(count)

    def delivered(self, seconds: float) -> None:
        """Tokens were handed to the socket, `seconds` after the end of the step that made them."""
        self._delivery.observe(seconds)

    def finished(
        self,
        timeline: RequestTimeline,
        counts: RequestCounts,
        reason: FinishReason,
        num_reasoning_tokens: int = 0,
    ) -> None:
        """A request has ended, for whatever reason."""
        self._success[reason.value].inc()
        self._prompt_tokens.inc(counts.num_prompt_tokens)
        self._cached_tokens.inc(counts.num_cached_tokens)
        self._reasoning_tokens.inc(num_reasoning_tokens)
        self._request_prompt_tokens.observe(counts.num_prompt_tokens)
        self._request_output_tokens.observe(counts.num_output_tokens)
        seconds = timeline.totals()
        self._e2e.observe(timeline.end - timeline.arrival)
        self._queue_time.observe(seconds[IntervalKind.QUEUE])
        for histogram, kinds in (
            (self._prefill_time, PREFILL_KINDS),
            (self._decode_time, DECODE_KINDS),
        ):
            phase = sum(seconds[kind] for kind in kinds)
            if phase > 0:
                histogram.observe(phase)
        if timeline.tpot is not None:
            self._tpot.observe(timeline.tpot)
        for kind, amount in seconds.items():
            self._seconds[kind].inc(amount)
        for apart, counter in self._seconds_apart.items():
            counter.inc(seconds[apart])

    def embedded(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """An embedding request was answered, `seconds` after its arrival."""
        self._texts.inc(num_texts)
        self._text_tokens.inc(num_tokens)
        self._embedding_seconds.observe(seconds)

    def aborted(self) -> None:
        """A request was given up before its end; only the engine knew where its time went."""
        self._success[FinishReason.ABORT.value].inc()

    def refused(self, status: int, reason: str, tenant: str = "") -> None:
        """A request was answered with an error before it was queued; `tenant` is whose queue was full.

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
