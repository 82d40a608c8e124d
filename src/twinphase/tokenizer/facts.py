"""Facts about a tokenizer besides its vocabulary, from GGUF metadata or a folder's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

# SentencePiece writes a space as this character.
SPACE = "▁"


class Spelling(Enum):
    """How a vocabulary encodes the bytes of a token."""

    BYTE_LEVEL = "one printable character for each byte, by GPT-2's table"
    SENTENCEPIECE = "text with U+2581 for a space, and <0xNN> for a byte"
    WORDPIECE = "text, with ## before what continues a word"


@dataclass(frozen=True)
class TokenizerFacts:
    """The special tokens and the spelling of a tokenizer.

    Attributes:
        vocab_size: one more than the highest token id.
        spelling: how tokens are spelled.
        names: the texts of special tokens by the names that chat templates use, such as
            "bos_token".
        bos_token_id: id of the token at the start of a text, or None.
        eos_token_id: id of the token at the end of a text, or None.
        end_token_ids: ids of all tokens that end generation: end of text, of turn, of message.
        prefix: ids added before a text.
        suffix: ids added after a text.
        middle: ids added between the two texts of a pair.
        strips_leading_space: whether encoding adds a space before the text, which decoding removes.
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
