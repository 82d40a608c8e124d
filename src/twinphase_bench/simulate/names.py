"""Options of `serve` that simulations share; every command imports this file, so it is small."""

from __future__ import annotations

# The engine options of a simulation, under the names in `serve`.
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
