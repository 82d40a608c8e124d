"""The inputs of an estimate: hardware, a request, and the bytes of the weights.

`estimate.py` computes the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.backends.base import Units
from twinphase.errors import InvalidRequestError
from twinphase.estimate.datasheets import find_datasheet
from twinphase.estimate.options import DTYPES
from twinphase.estimate.shapes import DecoderShape
from twinphase.models.size import Size
from twinphase.phases.hardware import Ceilings

# Names of the precisions in `Ceilings`.
_MEASURED_UNITS = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int8": "int8",
}


@dataclass(frozen=True)
class Hardware:
    """Peaks of the hardware.

    Attributes:
        kind: "datasheet", "measured here" or "given".
        peaks: operations per second of one device, by precision; missing ones are unknown.
        bandwidth: bytes per second of one device; None if unknown or given by `ceilings`.
        memory: bytes of one device; None is unknown.
        devices: number of devices that share every layer evenly, without communication costs.
        ceilings: ceilings of this machine, whose bandwidth depends on the bytes that a step reads.
    """

    name: str
    kind: str
    peaks: Mapping[str, float]
    bandwidth: float | None
    memory: float | None
    devices: int = 1
    ceilings: Ceilings | None = None
    notes: tuple[str, ...] = ()

    def peak(self, precision: str) -> float | None:
        """Operations per second of all devices."""
        if precision in self.peaks:
            return self.peaks[precision] * self.devices
        measured = self.ceilings.peak(_MEASURED_UNITS.get(precision, "")) if self.ceilings else None
        return measured * self.devices if measured else None

    def read_bandwidth(self, working_set: float) -> float | None:
        """Bytes per second of all devices, for steps that read `working_set` bytes."""
        one = self.bandwidth
        if one is None and self.ceilings is not None:
            one = self.ceilings.read_bandwidth(working_set / self.devices)
        return one * self.devices if one else None

    @property
    def capacity(self) -> float | None:
        return self.memory * self.devices if self.memory is not None else None


@dataclass(frozen=True)
class Scenario:
    """The requests, and the assumed efficiency of the hardware.

    Attributes:
        prompt_tokens: prompt tokens per request, none of them cached.
        output_tokens: output tokens per request; prefill computes the first one.
        batch_size: sequences that decode together, all at the same position.
        units: precision of the linear layers and of attention's two products.
        dtype: storage type of the weights; "" as in the model's file.
        kv_head_bytes: bytes of the key and value of one token in one KV head of one layer, 2 d b in
            the formula; the mean over heads if layers differ.
        mfu, mbu: assumed fractions of the peak and of the bandwidth.
        price_per_hour: price of all devices together.
    """

    prompt_tokens: int
    output_tokens: int
    batch_size: int
    units: Units
    dtype: str
    kv_head_bytes: float
    mfu: float = 1.0
    mbu: float = 1.0
    price_per_hour: float | None = None

    @property
    def precisions(self) -> list[str]:
        """The distinct precisions of `units`."""
        return list(dict.fromkeys((self.units.linear, self.units.scores, self.units.values)))


@dataclass(frozen=True)
class Drafting:
    """Assumed speculative decoding.

    Attributes:
        num_tokens: drafted tokens per request and step.
        acceptance: probability that a draft is accepted if all before it are.
        seconds: drafting time per step; None is unknown.
    """

    num_tokens: int
    acceptance: float
    seconds: float | None = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step: 1 + a + ... + a^k (Leviathan et al., 2023, arXiv:2211.17192, eq. 1)."""
        return sum(self.acceptance**position for position in range(self.num_tokens + 1))


def datasheet_hardware(name: str) -> Hardware:
    """A product's published peaks; raises as `find_datasheet` does."""
    sheet = find_datasheet(name, "Use this, --flops with --bandwidth, or")
    computed = [f"{figure} = {formula}" for figure, formula in sheet.computed.items()]
    titles = "; ".join(dict.fromkeys(source.title for source in sheet.sources))
    notes = [f"Datasheet figures from: {titles}. `--list-hardware` has the addresses."]
    notes += [f"Computed, not published: {'; '.join(computed)}."] if computed else []
    notes += [sheet.note] if sheet.note else []
    return Hardware(
        sheet.title, "datasheet", sheet.peaks, sheet.bandwidth, sheet.memory, notes=tuple(notes)
    )


def units_for(dtype: str) -> Units:
    """The precision of the arithmetic for a storage type of the weights.

    Weights of 8 bits (with 8-bit activations) and more are multiplied directly; narrower ones are
    converted to bf16 first. Attention uses 16 bits or more.
    """
    linear = dtype.lower() if dtype.lower() in ("fp32", "fp16", "bf16", "fp8", "int8") else "bf16"
    linear = {"f32": "fp32", "f16": "fp16"}.get(dtype.lower(), linear)
    attention = "bf16" if linear in ("fp8", "int8") else linear
    return Units(linear, attention, attention)


def bytes_per_weight(dtype: str) -> float:
    """Bytes per weight of "fp16" and the like, or of a GGUF type including its scales.

    Raises:
        InvalidRequestError: the name is unknown; the message lists all names.
    """
    if dtype.lower() in DTYPES:
        return DTYPES[dtype.lower()]
    from twinphase.weights.block_formats import FORMATS

    block = FORMATS.get(dtype.upper())
    if block is None:
        raise InvalidRequestError(
            f"dtype is {dtype!r}.", f"Use one of: {', '.join([*DTYPES, *FORMATS])}."
        )
    return block.block_bytes / block.block_size


def weight_bytes(shape: DecoderShape, dtype: str) -> Size:
    """Bytes of the weights: as in the file, or with every weight in `dtype`.

    Raises:
        InvalidRequestError: neither `dtype` nor the file defines a storage type.
    """
    if not dtype and shape.stored is not None:
        return shape.stored
    if not dtype and not shape.dtype:
        raise InvalidRequestError(
            f"{shape.name} does not say how its weights are stored.",
            f"Give --dtype, one of: {', '.join(DTYPES)}.",
        )
    each = bytes_per_weight(dtype or shape.dtype)
    return Size(**{use: round(count * each) for use, count in vars(shape.parameters).items()})
