"""Builds a `tokenizers` tokenizer from the vocabulary of a GGUF file.

Two families: byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama"). Done once per file; the result
is cached (tokenizer.py). Not for encoding or decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer

__all__ = ["SPACE", "build_tokenizer", "pre_tokenizer"]

SPACE = "▁"  # what SentencePiece writes for a space
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_FIX = "The file is damaged or was converted wrongly: fetch it again."


def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The pre-tokenizer a byte-level BPE file asks for; one that names none gets "default", as in llama.cpp.

    Raises:
        UnsupportedModelError: an unknown name.
    """
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"Pre-tokenizer {name!r} is not supported.", f"Supported: {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def build_tokenizer(metadata: Mapping[str, Any], vocabulary: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer from the file's scalars and strings, and its `tokenizer.ggml.*` arrays.

    Raises:
        UnsupportedModelError: another kind of tokenizer, or an unknown pre-tokenizer.
        CheckpointError: arrays that are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"Tokenizer model {kind!r} is not supported.", "Supported: gpt2 and llama.")
    # llama.cpp names empty entries so too; they stand for rows of the embedding that no text reaches.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_strings(vocabulary, "tokens"))]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError("The vocabulary has the same token twice.", _FIX)
    types = _numbers(vocabulary, "token_type", len(tokens), default=_NORMAL)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level_bpe(ids, _strings(vocabulary, "merges"), pre_tokenizer(metadata))
        else:
            scores = _numbers(vocabulary, "scores", len(tokens))
            tokenizer = _sentencepiece_bpe(ids, types, scores, metadata)
    except (UnsupportedModelError, CheckpointError):
        raise
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens for example
        raise CheckpointError(f"The vocabulary is inconsistent: {str(error).splitlines()[0]}.", _FIX) from None
    _add_tokens(tokenizer, tokens, types)
    return tokenizer


def _byte_level_bpe(ids: dict[str, int], merges: Sequence[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    pairs = []
    for merge in merges:
        # The left part may itself begin with a space.
        middle = merge.find(" ", 1)
        if middle < 0:
            raise CheckpointError(f"The merge {merge[:40]!r} does not name two tokens.", _FIX)
        pairs.append((merge[:middle], merge[middle + 1 :]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(
    ids: dict[str, int], types: Sequence[int], scores: Sequence[float], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokens = list(ids)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(ids, types, scores),
            unk_token=tokens[unknown] if unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _merges_by_score(ids: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule implies: of all neighbours that form a token, the best-scored token first.

    A token's score is the same whichever two parts form it; among those, SentencePiece takes the leftmost pair of the
    text, and a list of merges the first of the list, so the order within one token is a convention (shorter ids first).
    """
    mergeable = {token: i for token, i in ids.items() if types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    ranked = []
    for token, i in mergeable.items():
        for middle in range(1, len(token)):
            left, right = mergeable.get(token[:middle]), mergeable.get(token[middle:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right, token[:middle], token[middle:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are found in the text as they are, before any splitting."""
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])


def _strings(vocabulary: Mapping[str, Any], name: str) -> list[str]:
    values = vocabulary.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values:
        raise CheckpointError(f"The file has no list tokenizer.ggml.{name}.", _FIX)
    return values


def _numbers(vocabulary: Mapping[str, Any], name: str, count: int, default: int | None = None) -> list[Any]:
    values = vocabulary.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return [default] * count
    if values is None or isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"tokenizer.ggml.{name} does not have a number for each of {count} tokens.", _FIX)
    numbers: list[Any] = values.tolist()
    return numbers
