"""How long compiling will still take: kernels differ thirtyfold, so they count by their usual time.

Only the proportions matter; how fast this machine is shows in what it has done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Seconds that kernels usually took on one machine, by the first part of their spec.
USUAL_SECONDS = {
    "attention_prefill": 1.7,
    "attention_decode": 1.3,
    "attention_merge": 0.15,
    "quantized_linear": 1.0,
    "quantized_experts": 1.2,
    "dense_linear": 0.45,
    "dense_experts": 0.5,
    "pack": 0.12,
    "rope_kv_write": 0.4,
    "run_program": 1.9,
    "sample_rows": 1.6,
    "route": 0.2,
    "route_sigmoid": 0.2,
    "sort_rows": 0.2,
}
OTHER_SECONDS = 0.07
# Where there are no vectors to compute with, attention is unrolled instead.
ATTENTION_FACTOR = {"generic": 2.0}
# A compiling process imports Numba first, so each gets at least twice as much work.
START_SECONDS = 0.9
LEAST_SECONDS = 2 * START_SECONDS


def usual_seconds(isa: str, spec: str) -> float:
    """Usual seconds to compile the kernel with this spec, on the path named `isa`."""
    kernel = spec.partition(":")[0]
    factor = ATTENTION_FACTOR.get(isa, 1.0) if kernel.startswith("attention") else 1.0
    return factor * USUAL_SECONDS.get(kernel, OTHER_SECONDS)


def shared_out(isa: str, specs: Sequence[str], cores: int) -> list[list[str]]:
    """The specs in lists that take about as long, one per process; each begins with its slowest."""
    work = sum(usual_seconds(isa, spec) for spec in specs)
    jobs = max(1, min(cores, len(specs), int(work / LEAST_SECONDS)))
    shares: list[list[str]] = [[] for _ in range(jobs)]
    sums = [0.0] * jobs
    for spec in sorted(specs, key=lambda spec: usual_seconds(isa, spec), reverse=True):
        least = sums.index(min(sums))
        shares[least].append(spec)
        sums[least] += usual_seconds(isa, spec)
    return shares


class CompileEstimate:
    """The time that processes still need; each compiles its share in order."""

    def __init__(self, isa: str, shares: Sequence[Sequence[str]]) -> None:
        self._shares = shares
        self._usual = [[usual_seconds(isa, spec) for spec in share] for share in shares]
        for usual in self._usual:
            usual[0] += START_SECONDS
        self._finished_at = [0.0] * len(shares)
        self._counts = [0] * len(shares)

    def seconds_left(self, elapsed: float, done: Collection[str]) -> float | None:
        """Seconds until the last process ends; None before the first kernel is compiled.

        `elapsed` seconds after the start, the kernels in `done` were compiled.
        """
        counts = [sum(spec in done for spec in share) for share in self._shares]
        for index, count in enumerate(counts):
            if count != self._counts[index]:
                self._counts[index] = count
                self._finished_at[index] = elapsed
        known = list(zip(self._usual, counts, self._finished_at, strict=True))
        usual_so_far = sum(sum(usual[:count]) for usual, count, _ in known)
        if not usual_so_far:
            return None
        pace = sum(self._finished_at) / usual_so_far
        left = []
        for usual, count, finished_at in known:
            current, *later = [pace * seconds for seconds in usual[count:]] or [0.0]
            left.append(max(current - (elapsed - finished_at), 0.0) + sum(later))
        return max(left)

    def work_done(self, elapsed: float, done: Collection[str]) -> float:
        """Compiled work, in units of the mean kernel: the total is the number of kernels."""
        total = sum(map(len, self._shares))
        left = self.seconds_left(elapsed, done)
        if left is None or len(done) == total:
            return float(len(done))
        return total * elapsed / (elapsed + left)
