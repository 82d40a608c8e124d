"""Inspects and replaces the parts of a `tokenizers` tokenizer, such as its normalizer.

The library exposes a part's settings only as JSON, through the methods that pickle uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

# Normalizers that shorten a text to a third at most, by composing characters. Others may drop any
# part of it.
_KEEPING_LENGTH = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase"}
# The keys under which the JSON of a sequence has its parts.
_INNER = ("normalizers", "pretokenizers", "decoders")


def part_steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a part, or of each element of a sequence; each has a "type".

    The result is empty for None.
    """
    return list(_flat(_settings(part))) if part is not None else []


def without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same parts that treats control tokens as plain characters.

    A Unigram model still finds them, because their names are among its pieces; no supported decoder
    has such a model.
    """
    plain = tokenizers.Tokenizer(backend.model)
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    # All tokens are added, including control tokens, so that a user-defined token that overlaps one
    # is found as in `backend`. They are added by ascending id, because the library numbers tokens
    # that its model does not have in the order of their addition.
    plain.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def after_control(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`plain` for text after a control token, where newer SentencePiece adds no space."""
    if not any(step.get("prepend_scheme") == "first" for step in part_steps(plain.pre_tokenizer)):
        return plain
    settings = _settings(plain.pre_tokenizer)
    for step in _flat(settings):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    changed = pre_tokenizers.Metaspace()
    changed.__setstate__(json.dumps(settings).encode())
    other = without_special(plain)
    other.pre_tokenizer = changed
    return other


def keeps_length(normalizer: Any) -> bool:
    """Whether a text of n characters keeps at least n / 3 characters in this normalizer."""
    return all(map(_step_keeps_length, part_steps(normalizer)))


def _step_keeps_length(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        # A regular expression may match anything, so it counts as longer than its replacement.
        return len(step["pattern"].get("String", step["content"] + " ")) <= len(step["content"])
    return step["type"] in _KEEPING_LENGTH


def _settings(part: Any) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(part.__getstate__())
    return settings


def _flat(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = next((settings[key] for key in _INNER if key in settings), None)
    if inner is None:
        yield settings
    else:
        for step in inner:
            yield from _flat(step)
