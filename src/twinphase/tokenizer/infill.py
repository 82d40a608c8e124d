"""Fill-in-the-middle: the control tokens of vocabularies that support it, and the prompt.

The order is prefix, suffix, middle ("PSM": Bavarian et al., 2022, arXiv:2207.14255), as in
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinphase.errors import InvalidRequestError
from twinphase.tokenizer.tokenizer import Tokenizer

# Names in GGUF metadata (present and older ones), and in the vocabularies of Qwen, StarCoder,
# DeepSeek and CodeLlama.
_METADATA = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_NAMES = {
    "pre": (
        "<|fim_prefix|>",
        "<fim_prefix>",
        "<fim-prefix>",
        "<｜fim▁begin｜>",
        "▁<PRE>",
        "<|code_prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>",
        "<fim_suffix>",
        "<fim-suffix>",
        "<｜fim▁hole｜>",
        "▁<SUF>",
        "<|code_suffix|>",
    ),
    "mid": (
        "<|fim_middle|>",
        "<fim_middle>",
        "<fim-middle>",
        "<｜fim▁end｜>",
        "▁<MID>",
        "<|code_middle|>",
    ),
}
# Models end the middle with one of these tokens, besides the end of text.
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "▁<EOT>", "<|endoftext|>")


def infill_prompt(
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    prefix: str,
    suffix: str,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of a prompt for the text between `prefix` and `suffix`, both encoded as plain text.

    Args:
        tokenizer: tokenizer of the model.
        metadata: metadata of its GGUF file; empty for other files.
        prefix: text before the middle.
        suffix: text after the middle.
        max_tokens: maximum length of the prompt, as for `Tokenizer.encode`.

    Raises:
        InvalidRequestError: the vocabulary has no such tokens, or as `Tokenizer.encode`.
    """
    before, between, after = (_find(tokenizer, metadata, kind) for kind in ("pre", "suf", "mid"))
    if before is None or between is None or after is None:
        raise InvalidRequestError(
            "The model's vocabulary has no tokens to fill in the middle, which `suffix` needs.",
            "Leave out `suffix`, or serve a model that has them, such as qwen2.5-coder:0.5b.",
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(
            text, add_special_tokens=False, parse_special=False, max_tokens=max_tokens
        )

    return [*tokenizer.encode(""), before, *encode(prefix), between, *encode(suffix), after]


def infill_ends(tokenizer: Tokenizer) -> list[int]:
    """Tokens that end a middle."""
    return [found for name in _ENDS if (found := tokenizer.token_id(name)) is not None]


def _find(tokenizer: Tokenizer, metadata: Mapping[str, Any], kind: str) -> int | None:
    for key in (f"fim_{kind}_token_id", f"{_METADATA[kind]}_token_id"):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            return int(token_id)
    return next(
        (found for name in _NAMES[kind] if (found := tokenizer.token_id(name)) is not None), None
    )
