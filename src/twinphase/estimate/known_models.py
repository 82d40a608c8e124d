"""Shapes of well-known models, so that an estimate needs no file: the fields of each one's published config.json.

Only fields that `shapes.py` reads, as they stand in the repository that is named. Not for anything else about a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KNOWN_MODELS", "KnownModel"]


@dataclass(frozen=True)
class KnownModel:
    """A model by name.

    Attributes:
        repo: where its config.json is published, at https://huggingface.co/REPO.
        config: fields of that file.
    """

    repo: str
    config: Mapping[str, Any]

    @property
    def source(self) -> str:
        """Title and address of the document."""
        return f"config.json of {self.repo}, https://huggingface.co/{self.repo}/blob/main/config.json"


def _known(
    repo: str,
    model_type: str,
    sizes: tuple[int, int, int, int, int, int, int],
    dtype: str = "bfloat16",
    **more: Any,
) -> KnownModel:
    """Sizes are hidden, layers, heads, KV heads, feed-forward, vocabulary and context, in that order."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    fields = dict(zip(names, sizes, strict=True))
    return KnownModel(repo, {"model_type": model_type, **fields, "torch_dtype": dtype, **more})


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False}
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

KNOWN_MODELS: Mapping[str, KnownModel] = {
    "llama-2-7b": _known("meta-llama/Llama-2-7b-hf", "llama", (4096, 32, 32, 32, 11008, 32000, 4096), "float16"),
    "llama-2-13b": _known("meta-llama/Llama-2-13b-hf", "llama", (5120, 40, 40, 40, 13824, 32000, 4096), "float16"),
    "llama-2-70b": _known("meta-llama/Llama-2-70b-hf", "llama", (8192, 80, 64, 8, 28672, 32000, 4096), "float16"),
    "llama-3-8b": _known("meta-llama/Meta-Llama-3-8B", "llama", (4096, 32, 32, 8, 14336, 128256, 8192)),
    "llama-3-70b": _known("meta-llama/Meta-Llama-3-70B", "llama", (8192, 80, 64, 8, 28672, 128256, 8192)),
    "llama-3.1-8b": _known("meta-llama/Llama-3.1-8B", "llama", (4096, 32, 32, 8, 14336, 128256, 131072)),
    "llama-3.1-70b": _known("meta-llama/Llama-3.1-70B", "llama", (8192, 80, 64, 8, 28672, 128256, 131072)),
    "llama-3.1-405b": _known("meta-llama/Llama-3.1-405B", "llama", (16384, 126, 128, 8, 53248, 128256, 131072)),
    "llama-3.2-1b": _known(
        "meta-llama/Llama-3.2-1B", "llama", (2048, 16, 32, 8, 8192, 128256, 131072), head_dim=64, **_TIED
    ),
    "llama-3.2-3b": _known(
        "meta-llama/Llama-3.2-3B", "llama", (3072, 28, 24, 8, 8192, 128256, 131072), head_dim=128, **_TIED
    ),
    "mistral-7b": _known(
        "mistralai/Mistral-7B-v0.1", "mistral", (4096, 32, 32, 8, 14336, 32000, 32768), sliding_window=4096
    ),
    "mixtral-8x7b": _known(
        "mistralai/Mixtral-8x7B-v0.1",
        "mixtral",
        (4096, 32, 32, 8, 14336, 32000, 32768),
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "qwen2.5-0.5b": _known("Qwen/Qwen2.5-0.5B", "qwen2", (896, 24, 14, 2, 4864, 151936, 32768), **_TIED, **_NO_WINDOW),
    "qwen2.5-7b": _known("Qwen/Qwen2.5-7B", "qwen2", (3584, 28, 28, 4, 18944, 152064, 131072), **_NO_WINDOW),
    "qwen2.5-72b": _known("Qwen/Qwen2.5-72B", "qwen2", (8192, 80, 64, 8, 29568, 152064, 131072), **_NO_WINDOW),
    "qwen3-8b": _known("Qwen/Qwen3-8B", "qwen3", (4096, 36, 32, 8, 12288, 151936, 40960), head_dim=128, **_NO_WINDOW),
    "qwen3-30b-a3b": _known(
        "Qwen/Qwen3-30B-A3B",
        "qwen3_moe",
        (2048, 48, 32, 4, 6144, 151936, 40960),
        head_dim=128,
        moe_intermediate_size=768,
        **_QWEN_MOE,
        **_NO_WINDOW,
    ),
    "gemma-7b": _known("google/gemma-7b", "gemma", (3072, 28, 16, 16, 24576, 256000, 8192), head_dim=256),
    "gemma-2-9b": _known(
        "google/gemma-2-9b",
        "gemma2",
        (3584, 42, 16, 8, 14336, 256000, 8192),
        "float32",
        head_dim=256,
        sliding_window=4096,
    ),
    "phi-3-mini-4k": _known(
        "microsoft/Phi-3-mini-4k-instruct", "phi3", (3072, 32, 32, 32, 8192, 32064, 4096), sliding_window=2047
    ),
    "smollm2-135m": _known("HuggingFaceTB/SmolLM2-135M", "llama", (576, 30, 9, 3, 1536, 49152, 8192), **_TIED),
    "smollm2-360m": _known("HuggingFaceTB/SmolLM2-360M", "llama", (960, 32, 15, 5, 2560, 49152, 8192), **_TIED),
    "smollm2-1.7b": _known("HuggingFaceTB/SmolLM2-1.7B", "llama", (2048, 24, 32, 32, 8192, 49152, 8192), **_TIED),
}
