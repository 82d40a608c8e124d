"""The cost model: predicts the time of any mix of prefill and decode, and learns from steps.

A step's time is a sum of non-negative prices times counts (`FEATURES`). Prices start from the
machine's measured peaks and the model's shape, and are fitted to the steps that were run: least
squares of the relative error, by coordinate descent, so that no price becomes negative. Steps are
grouped into classes by size and mix, each with its own decaying memory, so that thousands of decode
steps do not make the model forget what prefill costs. A pace multiplies all prices; it adapts to a
machine that becomes slower or faster as a whole. Every prediction is compared with its step before
the model learns from it; `error` has the differences.

Sums of floats have a fixed order, so the same observations give the same prices, and a step log
replays exactly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinphase.batch import StepWork
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import ModelShape, kv_bytes_per_token, weight_bytes_read

FEATURES = (
    "step",
    "few_rows",
    "many_rows",
    "logits",
    "prefill_contexts",
    "decode_contexts",
    "sequences",
    "draft_contexts",
    "several_rows",
)
# A single row has its own code path, and `several_rows` is the cost of leaving it. Up to this
# number of rows, a step mostly waits for the weights; beyond, each row costs its arithmetic.
FEW_ROWS = 8
# Decay of a class of steps with each further step of that class.
MEMORY_FADE_PER_STEP = 0.98
# Weight of the starting prices, in steps.
PRIOR_WEIGHT_STEPS = 0.02
# Steps with a larger logarithmic error count less, because shared machines stall now and then.
OUTLIER = 0.5
# Share of a logarithmic error that the pace adopts.
PACE_LEARNING_RATE = 0.05
# Decay of the pace per step, so that a lasting pace moves into the prices.
PACE_FADE_PER_STEP = 0.999
MIN_STEP_SECONDS = 1e-9
# Prices are fitted after this number of steps, or after steps that took this long in all, so that
# each chunk of a long prompt counts at once. A fit takes about 0.15 ms.
REFIT_INTERVAL_STEPS = 8
REFIT_INTERVAL_SECONDS = 0.1
MIN_STEPS_TO_PREDICT = 12
# Number of sweeps of coordinate descent, which starts from the last prices.
DESCENT_SWEEPS = 12
KEPT_PREDICTIONS = 256
# Share of steps that the SLO's margin covers.
SLO_QUANTILE = 0.95


@dataclass(frozen=True)
class CostError:
    """Relative error of the last predictions, |predicted - measured| / measured."""

    steps: int
    median: float | None
    p95: float | None


def features(work: StepWork, windowed_share: float = 0.0) -> tuple[float, ...]:
    """The counts that prices multiply, in the order of `FEATURES`.

    Contexts are means over the layers; `windowed_share` of the layers attend only to a window.
    """
    few = min(work.rows, FEW_ROWS)
    prefill = work.prefill_contexts - windowed_share * (
        work.prefill_contexts - work.windowed_prefill_contexts
    )
    decode = work.decode_contexts - windowed_share * (
        work.decode_contexts - work.windowed_decode_contexts
    )
    drafted = decode * work.draft_contexts / work.decode_contexts if work.draft_contexts else 0.0
    return (
        1.0,
        few,
        work.rows - few,
        work.logits,
        prefill,
        decode - drafted,
        work.sequences,
        drafted,
        float(work.rows > 1),
    )


def starting_prices(shape: ModelShape, ceilings: Ceilings | None) -> tuple[float, ...]:
    """Seconds per unit of each feature before any step was measured.

    They assume the measured bandwidth for weights and KV and half of the measured peaks for
    operations, or the rates of a small machine. A rough guess is enough.
    """
    bandwidth = (ceilings.read_bandwidth(shape.weight_bytes) if ceilings else None) or 20e9
    int8 = (ceilings.int8_ops if ceilings else None) or 200e9
    floats = ((ceilings.bfloat16_flops or ceilings.float32_flops) if ceilings else None) or 100e9
    row = 2 * shape.linear_parameters / (0.5 * int8)
    attended = 4 * shape.num_layers * shape.num_heads * shape.head_dim / (0.5 * floats)
    step = weight_bytes_read(shape, 1, 0) / bandwidth + 3e-4
    logits = 2 * shape.head_parameters / (0.5 * int8) + 1e-5
    return (
        step,
        0.3 * row,
        row,
        logits,
        attended,
        kv_bytes_per_token(shape) / bandwidth,
        2e-5,
        attended,
        row,
    )


class CostModel:
    """Predicts step times, and learns from each step.

    Attributes:
        prices: seconds per unit of each feature.
        windowed_share: share of the model's layers that have a window.
        window: tokens of the window; None if no layer has one.
    """

    def __init__(
        self,
        prices: Sequence[float],
        windowed_share: float = 0.0,
        window: int | None = None,
        *,
        margin: float = 1.25,
        gap: float = 0.0,
    ) -> None:
        """Start from `starting_prices`, or from an earlier model's `learned`.

        Args:
            prices: seconds per unit of each feature.
            windowed_share: share of the model's layers that have a window.
            window: tokens of the window; None if no layer has one.
            margin: factor over the prediction that 95 % of the mixed steps stayed within.
            gap: mean seconds between two steps.
        """
        self.windowed_share = windowed_share
        self.window = window
        self._start = tuple(max(float(price), 1e-12) for price in prices)
        self.prices = self._base = self._start
        self._pace = 0.0  # The pace as a logarithm.
        self._classes: dict[tuple[bool, int], tuple[list[list[float]], list[float]]] = {}
        self._since_fit = 0
        self._seconds_since_fit = 0.0
        self._ratios: deque[float] = deque(maxlen=KEPT_PREDICTIONS)  # Measured / predicted times.
        self._mixed_ratios: deque[float] = deque(
            maxlen=KEPT_PREDICTIONS // 8
        )  # The same for steps with both prefill and decode.
        self._margin = margin
        self._gap = gap

    def features(self, work: StepWork) -> tuple[float, ...]:
        """`features` with this model's windows."""
        return features(work, self.windowed_share)

    def seconds(self, work: StepWork) -> float:
        """Predicted time of a step, seconds."""
        return max(
            MIN_STEP_SECONDS, sum(map(float.__mul__, self.prices, map(float, self.features(work))))
        )

    def step_limit(self, slo_seconds: float) -> float:
        """The largest predicted time of a step that still meets the SLO.

        It is the SLO minus the time between steps, divided by the factor over the prediction that
        95 % of the recent mixed steps stayed within.
        """
        return max(0.0, slo_seconds - self._gap) / self._margin

    def slo_seconds(self, step_seconds: float) -> float:
        """The SLO that a step of that predicted time just meets: the inverse of `step_limit`."""
        return step_seconds * self._margin + self._gap

    def observe(self, work: StepWork, seconds: float, gap: float = 0.0) -> None:
        """Learn from a step.

        Args:
            work: work of the step; an empty step is ignored.
            seconds: time of the step.
            gap: seconds that the front end used between the last step and this one, if requests
                were running.
        """
        if not work.rows or seconds <= 0:
            return
        self._gap += 0.1 * (gap - self._gap)
        ratio = seconds / self.seconds(work)
        self._ratios.append(ratio)
        if work.prefill_contexts and work.decode_contexts:
            self._mixed_ratios.append(ratio)
        error = math.log(ratio)
        usual = seconds / math.exp(
            self._pace
        )  # The time that the step would have taken at the pace of the base prices.
        self._learn(work, usual, min(1.0, OUTLIER / abs(error)) if error else 1.0)
        self._pace = PACE_FADE_PER_STEP * self._pace + PACE_LEARNING_RATE * max(
            -OUTLIER, min(OUTLIER, error)
        )
        self._since_fit += 1
        self._seconds_since_fit += seconds
        if (
            self._since_fit >= min(REFIT_INTERVAL_STEPS, len(self._ratios))
            or self._seconds_since_fit >= REFIT_INTERVAL_SECONDS
        ):
            self._since_fit = 0
            self._seconds_since_fit = 0.0
            self._fit()
        pace = math.exp(self._pace)
        self.prices = tuple(price * pace for price in self._base)

    @property
    def learned(self) -> dict[str, Any]:
        """The arguments with which a new model predicts as this one does."""
        return {
            "prices": self.prices,
            "windowed_share": self.windowed_share,
            "window": self.window,
            "margin": self._margin,
            "gap": self._gap,
        }

    @property
    def knows_both_phases(self) -> bool:
        """Whether enough steps of both phases were learned from to rely on predictions."""
        kinds = {has_prefill for has_prefill, _ in self._classes}
        return len(self._ratios) >= MIN_STEPS_TO_PREDICT and len(kinds) == 2

    def error(self) -> CostError:
        """Error of the last predictions, each made before the model learned from the step."""
        errors = sorted(abs(1 / ratio - 1) for ratio in self._ratios)
        if not errors:
            return CostError(0, None, None)
        return CostError(len(errors), _quantile(errors, 0.5), _quantile(errors, 0.95))

    def _learn(self, work: StepWork, seconds: float, weight: float) -> None:
        kind = (work.prefill_contexts > 0, work.rows.bit_length())
        if kind not in self._classes:
            size = len(FEATURES)
            self._classes[kind] = [[0.0] * size for _ in range(size)], [0.0] * size
        matrix, vector = self._classes[kind]
        # Dividing by the longer of both times weights relative errors, so that no very short step
        # outweighs the others.
        counts = self.features(work)
        whole = max(seconds, sum(map(float.__mul__, self._base, map(float, counts))))
        x = [count / whole for count in counts]
        y = seconds / whole
        for i, xi in enumerate(x):
            row = matrix[i]
            scaled = weight * xi
            for j, xj in enumerate(x):
                row[j] = MEMORY_FADE_PER_STEP * row[j] + scaled * xj
            vector[i] = MEMORY_FADE_PER_STEP * vector[i] + scaled * y

    def _fit(self) -> None:
        """Minimize squared relative errors plus a small penalty on distance from the start."""
        size = len(FEATURES)
        matrix = [[0.0] * size for _ in range(size)]
        vector = [0.0] * size
        for part, sums in self._classes.values():
            for i in range(size):
                vector[i] += sums[i]
                row = matrix[i]
                for j, value in enumerate(part[i]):
                    row[j] += value
        # Prices that start many times too low would never recover, so the start is scaled to fit
        # best.
        expected = [sum(map(float.__mul__, row, self._start)) for row in matrix]
        fitting = sum(map(float.__mul__, vector, self._start)) / sum(
            map(float.__mul__, expected, self._start)
        )
        for i, start in enumerate(self._start):
            weight = PRIOR_WEIGHT_STEPS / (start * max(1.0, fitting)) ** 2
            matrix[i][i] += weight
            vector[i] += weight * start
        prices = list(self._base)
        for _ in range(DESCENT_SWEEPS):
            for i, row in enumerate(matrix):
                rest = sum(map(float.__mul__, row, prices)) - row[i] * prices[i]
                prices[i] = max(0.0, (vector[i] - rest) / row[i])
        self._base = tuple(prices)
        if len(self._mixed_ratios) >= 8:
            self._margin = min(2.0, max(1.0, _quantile(sorted(self._mixed_ratios), SLO_QUANTILE)))


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
