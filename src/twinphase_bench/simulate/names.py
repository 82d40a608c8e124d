"""Options of `serve` that a simulation has too; imported by every command line, so light."""

from __future__ import annotations

# By `serve`'s names, what a simulation takes from the engine's options.
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
