"""Options of `serve` that a simulation has too. Every command imports them: keep this light."""

from __future__ import annotations

# The engine options of a simulation, with the names that `serve` has for them.
ENGINE_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "num_kv_blocks",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "itl_slo_ms",
    "speculative_config",
    "threads",
    "tensor_parallel_size",
)
CLUSTER_OPTIONS = ("replicas", "prefill_workers", "decode_workers", "threads_per_worker")
