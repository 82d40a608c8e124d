"""The options of an estimate: one declaration per option of the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.settings import check_settings, setting

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
# Bytes per value. Real 4-bit formats also store scales: GGUF's types include them, "int4" does not.
DTYPES: Mapping[str, float] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
MAX_TOKENS = 10**9


@dataclass(frozen=True)
class EstimateOptions:
    """Hardware, a request, and assumptions.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    hardware: str | None = setting(
        None, "Name of a datasheet, or `this`: what `twinphase roofline` measured here."
    )
    backend: str = setting(
        "cpu", "Backend whose measurements `--hardware this` uses: cpu or torch."
    )
    prompt_tokens: int = setting(
        1000, "Prompt tokens per request.", minimum=1, maximum=MAX_TOKENS, short="--input-len"
    )
    output_tokens: int = setting(
        200, "Output tokens per request.", minimum=1, maximum=MAX_TOKENS, short="--output-len"
    )
    batch_size: int = setting(1, "Requests that decode together.", minimum=1, maximum=MAX_TOKENS)
    dtype: str | None = setting(
        None,
        "Storage type of the weights: fp16, fp8, int4, Q4_0, ...",
        default_text="as in the model's file",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Storage type of keys and values: fp32, fp16, bf16, fp8 or int8. auto is 16 bits; with "
        "--hardware this, what the engine stores.",
        choices=("auto", *DTYPES),
    )
    compute_dtype: str | None = setting(
        None,
        "Precision of the arithmetic.",
        choices=PRECISIONS,
        default_text="follows --dtype",
    )
    mfu: float = setting(
        1.0, "Assumed share of the peak FLOP/s; 1 gives the bound.", above=0, maximum=1
    )
    mbu: float = setting(
        1.0, "Assumed share of the bandwidth; 1 gives the bound.", above=0, maximum=1
    )
    flops: str | None = setting(None, "Peak FLOP/s, instead of the datasheet's, e.g. 312T.")
    bandwidth: str | None = setting(
        None, "Memory bandwidth in bytes/s, instead of the datasheet's, e.g. 2.039T."
    )
    memory: str | None = setting(None, "Memory in bytes, instead of the datasheet's, e.g. 80G.")
    devices: int = setting(
        1, "Number of devices that share every layer.", minimum=1, maximum=1 << 20
    )
    price_per_hour: float | None = setting(
        None, "Price per hour of all devices together; gives the cost per million tokens.", above=0
    )
    speculative_config: str | None = setting(
        None, "Speculative decoding, as for `serve`: a method or an object of vLLM's keys."
    )
    acceptance: float | None = setting(
        None,
        "Assumed chance that a drafted token is right where those before it are. [needs "
        "--speculative-config]",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
