"""The engine's configuration: frozen, resolved once against the model, printed as it is used.

Not for a request's wishes (`SamplingParams`) nor for a model's shape (`models.config.ModelConfig`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

from twinphase.errors import InvalidRequestError

__all__ = [
    "BACKENDS",
    "KV_CACHE_DTYPES",
    "POLICIES",
    "EngineConfig",
    "available_cores",
    "free_memory",
    "module_command",
]

BACKENDS = ("cpu", "reference")
KV_CACHE_DTYPES = ("auto", "int8")
POLICIES = ("fcfs", "priority")
DEFAULT_SEAT_TOKENS = 1024  # of the KV cache for each seat, as far as a quarter of the free memory goes


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def module_command(module: str) -> list[str]:
    """Command that runs a module in a process of its own, arguments to be appended.

    As `python -m`, but the working directory is not on its path: what lies there is not ours to run.
    """
    code = (
        "import sys; sys.path[:] = filter(None, sys.path); import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code]


def free_memory() -> int | None:
    """Bytes of memory that could be taken now; None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs; the field names are vLLM's where it has them.

    Attributes:
        max_num_batched_tokens: token budget of a step, hence the largest prefill chunk.
        max_num_seqs: requests running at once; at most `max_num_batched_tokens`.
        max_model_len: longest prompt + output in tokens; None is the model's context.
        block_size: tokens of a KV cache block.
        num_kv_blocks: blocks of the KV cache; None is 1,024 tokens for each seat as far as a quarter of the free memory
            goes, and one request of `max_model_len` at least.
        kv_cache_dtype: "auto" (int8 keys with a scale per token and head, 16-bit values) or "int8" (values too).
        enable_prefix_caching: share the KV of equal prompt beginnings between requests.
        scheduling_policy: "fcfs", or "priority" (lower `Request.priority` first, then order of arrival).
        itl_slo_ms: longest gap between a request's tokens to aim for, in milliseconds; prefill chunks are cut so that
            running decodes keep within it, by the measured cost model. None: chunks fill the token budget.
        trace_file: where to log every request, decision and step time, one JSON object a line; None for nowhere.
        threads: compute threads; None lets the backend choose.
        isa: instruction-set path of the cpu backend; None is the best this processor has.
        backend: "cpu", or "reference" (slow NumPy float32, the oracle of the tests).
        seed: where the seeds of requests without one come from.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    itl_slo_ms: float | None = None
    trace_file: str | None = None
    threads: int | None = None
    isa: str | None = None
    backend: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
            self._check_positive(name)
        for name in ("max_model_len", "num_kv_blocks", "threads"):
            if getattr(self, name) is not None:
                self._check_positive(name)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidRequestError(f"seed is {self.seed!r}.", "Use a non-negative integer.")
        for name, choices in (
            ("backend", BACKENDS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("scheduling_policy", POLICIES),
        ):
            if getattr(self, name) not in choices:
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}.", f"Use one of: {', '.join(choices)}.")
        slo = self.itl_slo_ms
        if slo is not None and (isinstance(slo, bool) or not isinstance(slo, (int, float)) or not 0 < slo < 1e6):
            raise InvalidRequestError(f"itl_slo_ms is {slo!r}.", "Use milliseconds above 0, or none for no limit.")
        if not isinstance(self.enable_prefix_caching, bool):
            raise InvalidRequestError(f"enable_prefix_caching is {self.enable_prefix_caching!r}.", "Use true or false.")

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequestError(f"{name} is {value!r}.", "Use a positive integer.")

    def resolve(self, context_length: int, kv_token_bytes: int = 0) -> EngineConfig:
        """The same configuration with `max_model_len` and `num_kv_blocks` filled in for a model.

        `max_num_seqs` is lowered to the token budget: a step must be able to give every running request its token.

        Args:
            context_length: tokens the model was trained for.
            kv_token_bytes: about what a token takes in the KV cache; 0 is unknown, and memory then no limit.

        Raises:
            InvalidRequestError: `max_model_len` exceeds the model's `context_length`.
        """
        max_model_len = self.max_model_len or context_length
        if max_model_len > context_length:
            raise InvalidRequestError(
                f"max_model_len is {max_model_len}, but the model was trained for {context_length} tokens.",
                f"Use at most {context_length}.",
            )
        max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        cache_tokens, memory = max_num_seqs * DEFAULT_SEAT_TOKENS, free_memory()
        if kv_token_bytes and memory is not None:
            cache_tokens = min(cache_tokens, memory // 4 // kv_token_bytes)
        num_kv_blocks = self.num_kv_blocks or -(-max(max_model_len, cache_tokens) // self.block_size)
        return replace(self, max_model_len=max_model_len, num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs)
