"""The engine's configuration: frozen, resolved once against the model, printed as it is used.

Not for a request's wishes (`SamplingParams`) nor for a model's shape (`blueprint.Blueprint`).
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from twinphase.errors import InvalidRequestError
from twinphase.numa import rank_places, usable_cores
from twinphase.request import GenerationDefaults
from twinphase.settings import check_settings, setting
from twinphase.speculative import speculative_config

# How many engines a server runs on this machine, for their processes.
ENGINES_VARIABLE = "TWINPHASE_ENGINES_HERE"
BACKENDS = ("cpu", "reference", "torch")
DTYPES = ("auto", "float16", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("none", "q8_0", "q4_0", "q4_k")
MAX_THREADS = 1024
POLICIES = ("fcfs", "priority")
TASKS = ("generate", "embed", "score")
POOLINGS = ("mean", "cls", "last")
# The zeros, two of a request, and a snapshot.
MIN_STATE_SLOTS = 4
DEFAULT_SLOTS_PER_SEAT = 4
STATE_INTERVALS = (64, 4096)
DEFAULT_SEAT_TOKENS = (
    1024  # of the KV cache for each seat, as far as a quarter of the free memory goes
)


def available_cores() -> int:
    """Cores this process may use."""
    return len(usable_cores())


def cores_of_each_engine() -> int:
    """Cores of this process, divided by the engines that its server runs on this machine."""
    return max(1, available_cores() // int(os.environ.get(ENGINES_VARIABLE, "1")))


def module_command(module: str) -> list[str]:
    """Command that runs a module in a process of its own, arguments to be appended.

    As `python -m`, but the working directory is not on its path: what lies there is not ours to
    run.
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
class EngineConfig(GenerationDefaults):
    """How an engine runs; the field names are vLLM's where it has them.

    Raises:
        InvalidRequestError: a value that its declaration does not allow.
    """

    max_num_batched_tokens: int = setting(
        512,
        "Token budget of a step, which is also the largest prefill chunk.",
        minimum=1,
        maximum=1 << 20,
    )
    max_num_seqs: int = setting(
        64,
        "Requests that run at once; at most the token budget of a step.",
        minimum=1,
        maximum=1 << 20,
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt plus output, in tokens.",
        minimum=1,
        maximum=1 << 30,
        default_text="the model's context",
    )
    block_size: int = setting(16, "Tokens per block of the KV cache.", minimum=1, maximum=1 << 20)
    num_kv_blocks: int | None = setting(
        None,
        "Blocks of the KV cache.",
        minimum=1,
        maximum=1 << 30,
        default_text="1,024 tokens per running request, up to a quarter of the free memory",
    )
    num_state_slots: int | None = setting(
        None,
        "Slots for the states of recurrent layers: two per running request, and snapshots where "
        "cached prefixes end.",
        minimum=MIN_STATE_SLOTS,
        maximum=1 << 30,
        default_text="four per running request, up to an eighth of the free memory",
    )
    state_interval: int | None = setting(
        None,
        "Tokens of a prompt between snapshots of recurrent states; another is kept at its end.",
        minimum=1,
        maximum=1 << 30,
        default_text="64 for small states, up to 4,096 for large ones",
    )
    quantization: str = setting(
        "none",
        "Quantize a Hugging Face folder while loading: q8_0, q4_0 or q4_k. The result is kept.",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Precision of the KV cache: auto keeps int8 keys and 16-bit values, int8 stores values "
        "in int8 too.",
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV cache of equal prompt beginnings.")
    scheduling_policy: str = setting(
        "fcfs",
        "Which request goes first: fcfs, or priority (lower values first).",
        choices=POLICIES,
    )
    speculative_config: str | dict[str, Any] | None = setting(
        None,
        "Guess tokens and verify them together; the answers stay the same: auto, ngram, suffix, "
        "none, or a JSON object "
        "with vLLM's keys.",
        default_text="none",
    )
    itl_slo_ms: float | str | None = setting(
        "auto",
        "Target for the longest gap between two tokens, in milliseconds: prefill chunks are cut "
        "to meet it. auto: a "
        "server chooses it by its own measured steps; off: no target.",
        above=0,
        maximum=1e6,
        words=("auto", "off"),
    )
    trace_file: str | None = setting(
        None,
        "Log every request, decision and step time to this file, for `twinphase replay`.",
        default_text="no log",
    )
    threads: int | None = setting(
        None,
        "Compute threads, of each rank where there are several.",
        minimum=1,
        maximum=MAX_THREADS,
        default_text="all cores",
    )
    tensor_parallel_size: int = setting(
        1,
        "Processes that each compute a share of every layer; the answers have the same bits.",
        minimum=1,
        maximum=256,
        short="-tp",
    )
    tensor_parallel_timeout: float = setting(
        30.0, "Seconds without progress after which a tensor parallel rank counts as dead.", above=0
    )
    isa: str | None = setting(
        None,
        "Instruction-set path of the cpu backend, such as avx2. On processors with AMX, "
        "avx512-amx-bf16 favors long prompts and many requests over a lone answer.",
        default_text="the best that this processor has",
    )
    backend: str = setting(
        "cpu",
        "Backend: cpu, torch (GPUs), or reference (slow NumPy float32, the oracle of the tests).",
        choices=BACKENDS,
    )
    device: str | None = setting(
        None,
        "Device of the torch backend: cpu, cuda or cuda:N.",
        default_text="cuda, or cpu where there is none",
    )
    dtype: str = setting(
        "auto",
        "Element type of weights, KV cache and products with the torch backend; auto is bfloat16 "
        "(float16 before "
        "Ampere) on a GPU and float32 on a processor.",
        choices=DTYPES,
    )
    enforce_eager: bool = setting(
        False,
        "Start every kernel of the torch backend by itself: no captured CUDA graphs of decode "
        "steps.",
    )
    dequantize: bool = setting(
        False,
        "Dequantize weights while loading, instead of in the torch backend's kernels on a GPU: "
        "prefill unpacks "
        "nothing, and decode reads 2 bytes per parameter.",
    )
    task: str | None = setting(
        None,
        "Task of the model: generate (text), embed (vectors) or score (pairs of texts); an encoder "
        "has only one, and Qwen3-Reranker needs score.",
        choices=TASKS,
        default_text="what the model is made for",
    )
    pooling: str | None = setting(
        None,
        "With --task embed, the source of the vector: mean (of all tokens), cls (the first token) "
        "or last.",
        choices=POOLINGS,
        default_text="an encoder's own; last for a decoder",
    )
    seed: int = setting(
        0,
        "Seed from which requests without their own seed get one.",
        minimum=0,
        maximum=(1 << 63) - 1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self.check_override()
        speculative_config(self.speculative_config)
        self._check_device()

    def _check_device(self) -> None:
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise InvalidRequestError(f"device is {self.device!r}.", "Use cpu, cuda or cuda:N.")
        if self.backend == "torch" and self.isa is not None:
            raise InvalidRequestError(
                f"isa is {self.isa!r}, but torch chooses its own kernels.", "Leave it out."
            )
        own = {"device": None, "dtype": "auto", "enforce_eager": False, "dequantize": False}
        for name, default in own.items():
            value = getattr(self, name)
            if value != default and self.backend != "torch":
                raise InvalidRequestError(
                    f"{name} is {value!r} with the {self.backend} backend.",
                    "Use the torch backend, or leave it out.",
                )

    @property
    def slo_seconds(self) -> float | None:
        """The SLO, if it is a number."""
        slo = self.itl_slo_ms
        return None if slo is None or isinstance(slo, str) else slo / 1e3

    @property
    def rank_threads(self) -> int | None:
        """Threads of one rank; None leaves them to the backend, where there is but one.

        All ranks have as many as fit the fewest cores that one of them has, as their shares are
        equal; only `cpu` binds them to cores.
        """
        if self.threads is not None or self.tensor_parallel_size == 1:
            return self.threads
        if self.backend != "cpu":
            return max(1, available_cores() // self.tensor_parallel_size)
        places = rank_places(self.tensor_parallel_size)
        return max(1, min(len(place.cores) // places.count(place) for place in places))

    def resolve(
        self,
        context_length: int,
        kv_token_bytes: float = 0,
        memory: int | None = None,
        state_bytes: int = 0,
    ) -> EngineConfig:
        """The same configuration with `max_model_len`, `num_kv_blocks` and `threads` filled in.

        `max_num_seqs` is lowered to the token budget: a step must be able to give every running
            request its token.

        Args:
            context_length: tokens the model was trained for.
            kv_token_bytes: what a token takes in the KV cache; 0 is unknown, and memory then no
                limit.
            memory: free bytes of the device; None where it has none of its own.
            state_bytes: what the state of a sequence takes; 0 for a model without recurrent layers.

        Raises:
            InvalidRequestError: `max_model_len` exceeds the model's `context_length`, or there are
                slots for states that the model does not have.
        """
        max_model_len = self.max_model_len or context_length
        if max_model_len > context_length:
            raise InvalidRequestError(
                f"max_model_len is {max_model_len}, but the model was trained for "
                f"{context_length} tokens.",
                f"Use at most {context_length}.",
            )
        max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        cache_tokens = max_num_seqs * DEFAULT_SEAT_TOKENS
        memory = memory or free_memory()
        if kv_token_bytes and memory is not None:
            cache_tokens = min(cache_tokens, int(memory // 4 // kv_token_bytes))
        num_kv_blocks = self.num_kv_blocks or -(
            -max(max_model_len, cache_tokens) // self.block_size
        )
        slo = None if self.itl_slo_ms == "off" else self.itl_slo_ms
        resolved = replace(
            self,
            max_model_len=max_model_len,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
        )
        resolved = replace(resolved, itl_slo_ms=slo, threads=self.rank_threads)
        if state_bytes:
            return resolved._with_states(state_bytes, kv_token_bytes, memory)
        for name in ("num_state_slots", "state_interval"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)}, but the model has no recurrent layers.",
                    "Leave it out.",
                )
        return resolved

    def _with_states(
        self, state_bytes: int, kv_token_bytes: float, memory: int | None
    ) -> EngineConfig:
        """Fill in the fields of recurrent states.

        Snapshots are so far apart that they take no more memory than the KV between them.
        """
        slots = DEFAULT_SLOTS_PER_SEAT * self.max_num_seqs
        if memory is not None:
            slots = min(slots, memory // 8 // state_bytes)
        slots = self.num_state_slots or max(MIN_STATE_SLOTS, slots + 1)
        least, most = STATE_INTERVALS
        tokens = int(state_bytes / kv_token_bytes) if kv_token_bytes else most
        interval = self.state_interval or min(most, max(least, 1 << tokens.bit_length()))
        interval = -(-interval // self.block_size) * self.block_size
        return replace(self, num_state_slots=slots, state_interval=interval)
