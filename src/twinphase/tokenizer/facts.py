"""Facts about a tokenizer beside its vocabulary, from GGUF metadata or a folder's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

# What SentencePiece writes for a space.
SPACE = "▁"


class Spelling(Enum):
    """How the vocabulary spells the bytes of a token."""

    BYTE_LEVEL = "one printable character for each byte, by GPT-2's table"
    SENTENCEPIECE = "text with U+2581 for a space, and <0xNN> for a byte"
    WORDPIECE = "text, with ## before what continues a word"


@dataclass(frozen=True)
class TokenizerFacts:
    """Special tokens and spelling of one tokenizer.

    Attributes:
        vocab_size: one more than the highest token id.
        spelling: how tokens are spelled.
        names: the texts of special tokens by the names that chat templates use, such as
            "bos_token".
        bos_token_id: the token that begins a text, or None.
        eos_token_id: the token that ends a text, or None.
        end_token_ids: every token that ends generation: end of text, of turn, of message.
        prefix: ids put before a text.
        suffix: ids put after a text.
        middle: ids put between two texts that are read together.
        strips_leading_space: encoding puts a space before the text, which decoding takes away.
    """

    vocab_size: int
    spelling: Spelling
    names: Mapping[str, str]
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: frozenset[int]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    middle: tuple[int, ...] = ()
    strips_leading_space: bool = False
