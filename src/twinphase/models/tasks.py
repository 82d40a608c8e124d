"""The task of a model according to its files: to generate text, to embed texts, or to score pairs.

`engine/frontends/checks.py` checks the task that a caller requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinphase.errors import UnsupportedModelError
from twinphase.models.config import FIX
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.safetensors_header import strict_json

# GGUF's names of architectures that do not generate text.
ENCODERS = ("bert", "gemma-embedding")
# GGUF's name of the matrix that computes a reranker's score.
HEAD = "cls.output.weight"
# llama.cpp's enum llama_pooling_type, and sentence-transformers' flags in 1_Pooling/config.json.
# 0 means that the model leaves the choice to its user; "rank" is the score of a reranker.
GGUF_POOLING = {0: None, 1: "mean", 2: "cls", 3: "last", 4: "rank"}
FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class RerankPrompt:
    """The prompt that asks a decoder whether a document answers a query.

    Attributes:
        before, after: text around the pair, including control tokens.
        pair: text of the pair, with the placeholders {query} and {document}.
        yes, no: tokens whose next-token logits are compared.
    """

    before: str
    pair: str
    after: str
    yes: str = "yes"
    no: str = "no"


# Prompts by GGUF's name of the architecture. Qwen3-Reranker's is from its model card (Zhang et al.,
# 2025, arXiv:2506.05176), with the default instruction given there.
RERANK_PROMPTS = {
    "qwen3": RerankPrompt(
        before="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
        'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
        "<|im_end|>\n<|im_start|>user\n",
        pair="<Instruct>: Given a web search query, retrieve relevant passages that answer the "
        "query\n<Query>: {query}\n<Document>: {document}",
        after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
}


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether the model has bidirectional attention, so that it does not generate text."""
    return checkpoint.architecture in ENCODERS


def own_task(checkpoint: Checkpoint) -> str:
    """The model's own task: "generate", "embed" or "score". Raises as `own_pooling`."""
    pooling = own_pooling(checkpoint)
    if pooling == "rank":
        return "score"
    return "embed" if pooling else "generate"


def own_pooling(checkpoint: Checkpoint) -> str | None:
    """The pooling of the last layer's rows: "mean", "cls", "last", or "rank" for a reranker.

    It comes from the file or the sentence-transformers folder; None if neither has it, which stands
    for the mean in an encoder.

    Raises:
        UnsupportedModelError: the pooling is not supported.
    """
    default = "mean" if is_encoder(checkpoint) else None
    name = checkpoint.path.name
    if checkpoint.config is None:
        number = checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type", 0)
        if number not in GGUF_POOLING:
            raise UnsupportedModelError(
                f"{name} has pooling_type {number!r}.", "Use mean, cls, last or rank pooling."
            )
        pooling = GGUF_POOLING[number]
        return "rank" if pooling is None and HEAD in checkpoint.tensors else pooling or default
    if HEAD in checkpoint.tensors:
        return "rank"
    path = checkpoint.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return default
    settings = strict_json(path.read_bytes(), str(path), FIX)
    flags = [
        name
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if len(flags) != 1 or flags[0] not in FLAGS:
        raise UnsupportedModelError(
            f"{name} pools by {', '.join(flags)[:200] or 'nothing'}.",
            "Use a model with mean, cls or last pooling.",
        )
    return FLAGS[flags[0]]


def matryoshka_sizes(checkpoint: Checkpoint) -> list[int] | None:
    """Sizes that the model's vectors may be cut to by training (Kusupati et al., 2022).

    As in vLLM, they are `matryoshka_dimensions` of config.json, or an empty list (any size) if
    `is_matryoshka` is true; None if neither field exists.
    """
    config = checkpoint.config or {}
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes:
        return [size for size in sizes if type(size) is int]
    return [] if config.get("is_matryoshka") is True else None


def is_raw_score(checkpoint: Checkpoint) -> bool:
    """Whether a reranker's score is the output of its head without a sigmoid.

    The sigmoid is used unless the config names another function, as in sentence-transformers.

    Raises:
        UnsupportedModelError: the function is not supported.
    """
    config = checkpoint.config or {}
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    function = str(name).rpartition(".")[2]
    if function not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(
            f"{checkpoint.path.name} has the activation {str(name)[:80]!r} of its scores.",
            "Use a model with Sigmoid or Identity.",
        )
    return function == "Identity"


def rerank_prompt(checkpoint: Checkpoint) -> RerankPrompt | None:
    """The prompt for reranking with a decoder; None if its architecture has none.

    Raises:
        UnsupportedModelError: the file has another prompt.
    """
    prompt = RERANK_PROMPTS.get(checkpoint.architecture)
    template = checkpoint.metadata.get("tokenizer.chat_template.rerank")
    if prompt and template not in (None, prompt.before + prompt.pair + prompt.after):
        raise UnsupportedModelError(
            f"{checkpoint.path.name} has a template for reranking that is not Qwen3-Reranker's.",
            "Use Qwen3-Reranker.",
        )
    return prompt
