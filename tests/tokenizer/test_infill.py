"""The fill-in-the-middle prompt: by metadata, by names in the vocabulary, or unavailable."""

from types import SimpleNamespace

import pytest
from tests.tokenizer.tiny_tokenizer import byte_level

from twinphase.errors import ContextLengthError, InvalidRequestError
from twinphase.tokenizer.infill import infill_ends, infill_prompt


@pytest.mark.parametrize(
    "names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")]
)
def test_tokens_of_the_metadata_stand_around_plain_text(names):
    tokenizer = byte_level()
    metadata = {f"tokenizer.ggml.{name}_token_id": 300 + i for i, name in enumerate(names)}
    before = "def a(<|im_end|>"
    behind = " the\n"
    plain = [
        tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        for text in (before, behind)
    ]
    assert infill_prompt(tokenizer, metadata, before, behind) == [
        300,
        *plain[0],
        301,
        *plain[1],
        302,
    ]
    with pytest.raises(ContextLengthError):
        infill_prompt(tokenizer, metadata, "a", "b" * 10_000, 5)


def test_else_those_of_the_vocabulary_or_none():
    known = {
        "<|fim_prefix|>": 7,
        "<|fim_suffix|>": 8,
        "<|fim_middle|>": 9,
        "<|fim_pad|>": 10,
        "<|endoftext|>": 11,
    }
    named = SimpleNamespace(
        token_id=known.get, encode=lambda text, **_: [ord(character) for character in text]
    )
    assert infill_prompt(named, {}, "a", "b") == [7, 97, 8, 98, 9] and infill_ends(named) == [
        10,
        11,
    ]
    with pytest.raises(InvalidRequestError, match="no tokens to fill in the middle"):
        infill_prompt(byte_level(), {}, "a", "b")
