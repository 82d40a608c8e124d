"""Step times of other hardware, from datasheet peaks and stated efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.batch import Batch, StepWork
from twinphase.estimate.inputs import Hardware, Scenario
from twinphase.phases.cost import CostModel
from twinphase.phases.work import ModelShape, step_cost, weight_bytes_read
from twinphase.scheduler.chunk import StepCost

# There are two reductions per layer over all ranks; each waits for the slowest rank and the link.
SECONDS_PER_REDUCTION = 10e-6


@dataclass(frozen=True)
class Efficiency:
    """Shares of a datasheet's peaks that real engines reach.

    Attributes:
        mfu: share of the peak FLOP/s in prefill.
        mbu: share of the memory bandwidth in decode.
        step_seconds: additional time per step, for scheduling and launching kernels.
        source: source of the figures.
    """

    mfu: float
    mbu: float
    step_seconds: float
    source: str


GPU = Efficiency(
    0.5,
    0.75,
    5e-4,
    "MBU 0.75: two public vLLM tables of Llama-3.1-8B in 16 bits at one request, 6.48 ms per token "
    "on an H100 SXM and 13.3 ms on an A100 40 GB, are 0.72 to 0.77 of the bandwidth. MFU 0.5 is "
    "an assumption: Pope et al., 2022 (arXiv:2211.05102) report 0.76 for large batches of long "
    "prompts, and short prompts stay below.",
)
CPU = Efficiency(
    0.5,
    0.6,
    5e-4,
    "MFU 0.5 and MBU 0.6 are assumptions near what `twinphase roofline smollm2` shows on two "
    "cores; measure the machine with --calibrate for a better answer.",
)


class EstimatedCost(CostModel):
    """Predicts a step by the formulas of `twinphase estimate`; it does not learn.

    The linear layers and attention run one after the other; each takes the longer of its arithmetic
    and its bytes.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        scenario: Scenario,
        step_seconds: float,
    ) -> None:
        """Use the peaks of `hardware` with the MFU and MBU of `scenario`.

        Raises:
            ValueError: a peak or the bandwidth is unknown.
        """
        super().__init__((), shape.windowed_share, shape.window, margin=1.0)
        units = scenario.units
        peaks = [hardware.peak(unit) for unit in (units.linear, units.scores, units.values)]
        bandwidth = hardware.read_bandwidth(shape.weight_bytes)
        if not all(peaks) or not bandwidth:
            raise ValueError("a peak or the bandwidth is unknown")
        linear, scores, values = (1 / (peak * scenario.mfu) for peak in peaks if peak)
        self._shape = shape
        self._linear = linear
        self._attention = (scores + values) / 2
        self._byte = 1 / (bandwidth * scenario.mbu)
        reductions = 2 * shape.num_layers if hardware.devices > 1 else 0
        self._fixed = step_seconds + reductions * SECONDS_PER_REDUCTION

    def seconds(self, work: StepWork) -> float:
        if not work.rows:
            return self._fixed
        cost = step_cost(self._shape, work)
        weights = weight_bytes_read(self._shape, work.rows, work.logits)
        linear = max(cost.linear_flops * self._linear, weights * self._byte)
        attention = max(cost.attention_flops * self._attention, cost.bytes * self._byte)
        return self._fixed + linear + attention

    @property
    def is_even(self) -> bool:
        """Whether a step's bytes grow by a constant number with each token of its contexts."""
        return self.window is None and not self._shape.shared_kv_layers

    def limits(self, work: StepWork) -> dict[str, float]:
        """Seconds of a step by bottleneck: "arithmetic", "bandwidth" or "overhead"."""
        cost = step_cost(self._shape, work)
        weights = weight_bytes_read(self._shape, work.rows, work.logits)
        found = {"arithmetic": 0.0, "bandwidth": 0.0, "overhead": self._fixed}
        for compute, memory in (
            (cost.linear_flops * self._linear, weights * self._byte),
            (cost.attention_flops * self._attention, cost.bytes * self._byte),
        ):
            found["arithmetic" if compute >= memory else "bandwidth"] += max(compute, memory)
        return found

    def decode_seconds(self, work: StepWork, number: int) -> list[float]:
        """Seconds of a decode step and of the following steps, each with contexts one token longer.

        The work besides KV is constant, and the work of KV grows linearly (see `is_even`).
        """
        first = step_cost(self._shape, work)
        second = step_cost(self._shape, _later(work, 1))
        weights = weight_bytes_read(self._shape, work.rows, work.logits)
        fixed = self._fixed + max(first.linear_flops * self._linear, weights * self._byte)
        flops = first.attention_flops
        more_flops = second.attention_flops - flops
        nbytes = first.bytes
        more_bytes = second.bytes - nbytes
        found = []
        for _ in range(number):
            found.append(fixed + max(flops * self._attention, nbytes * self._byte))
            flops += more_flops
            nbytes += more_bytes
        return found


def decode_works(batch: Batch, number: int) -> list[StepWork]:
    """The work of a decode step and of the following ones, each with contexts one token longer."""
    window = batch.window
    works = [_later(batch.work, step) for step in range(number)]
    if window is None:
        return works
    contexts = [share.num_computed_tokens + 1 for share in batch.decodes]
    near = [sum(min(context + step, window) for context in contexts) for step in range(number)]
    return [
        work._replace(windowed_decode_contexts=tokens, windowed_kv_tokens=tokens)
        for work, tokens in zip(works, near, strict=True)
    ]


def decode_seconds(times: StepCost, batch: Batch, number: int) -> list[float]:
    """Predicted seconds of the steps of `decode_works`."""
    if isinstance(times, EstimatedCost) and times.is_even:
        return times.decode_seconds(batch.work, number)
    return [times.seconds(work) for work in decode_works(batch, number)]


def _later(work: StepWork, steps: int) -> StepWork:
    """The work of the same decodes `steps` steps later; windows are ignored."""
    more = steps * work.sequences
    return work._replace(
        decode_contexts=work.decode_contexts + more, kv_tokens=work.kv_tokens + more
    )
