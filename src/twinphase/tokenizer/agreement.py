"""Compares two vocabularies, because a draft model must have the same tokens as its target."""

from __future__ import annotations

from twinphase.tokenizer.tokenizer import Tokenizer


def first_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """The lowest token id with different tokens, in words; None if the vocabularies agree.

    Ids that only the longer vocabulary has are not compared, because vocabularies are padded.
    """
    names = one.names()
    other_names = other.names()
    for token_id in sorted(names.keys() & other_names.keys()):
        here = names[token_id]
        there = other_names[token_id]
        if here != there:
            return f"token {token_id} is {here!r} in one and {there!r} in the other"
        if one.is_special(token_id) != other.is_special(token_id):
            kinds = ["text", "a control token"]
            if one.is_special(token_id):
                kinds.reverse()
            return f"token {token_id}, {here!r}, is {' and '.join(kinds)}"
    common = min(one.vocab_size, other.vocab_size)
    lonely = [i for i in names.keys() ^ other_names.keys() if i < common]
    return f"only one of them has a token {min(lonely)}" if lonely else None
