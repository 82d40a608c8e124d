"""Streaming gives the text of decoding at once, cut at stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokenizer.tiny_tokenizer import byte_level as tokenizer

from twinphase.tokenizer.detokenizer import Detokenizer

VOCAB = 320


def stream(
    ids: list[int], stop: list[str] | None = None, **options: bool
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer(), stop or [], **options)
    return [*map(detokenizer.append, ids), detokenizer.flush()], detokenizer


@given(st.lists(st.integers(-1, VOCAB + 5), max_size=40), st.booleans())
def test_pieces_join_to_the_decoded_whole(ids, skip):
    pieces, _ = stream(ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer().decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_no_piece_has_half_a_character(text):
    pieces, _ = stream(tokenizer().encode(text, parse_special=False))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    ids = tokenizer().encode("😀")
    assert len(ids) == 4
    assert stream(ids)[0] == ["", "", "", "😀", ""]
    assert stream(ids[:3])[0] == ["", "", "", "\ufffd"]


@given(
    st.text("abc\n", max_size=30),
    st.lists(st.text("abc\n", min_size=1, max_size=4), max_size=3),
    st.randoms(),
)
def test_the_cut_does_not_depend_on_the_tokens(text, stop, rng):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    pieces, detokenizer = stream(tokenizer().encode(text), stop)
    assert "".join(pieces) == expected
    assert detokenizer.stopped == bool(ends)


def test_text_that_may_begin_a_stop_string_is_held_back():
    detokenizer = Detokenizer(tokenizer(), ["STOP"])
    out = [detokenizer.append(i) for i in tokenizer().encode("xSTySTO")]
    assert out == ["x", "", "", "STy", "", "", ""]
    assert detokenizer.append(tokenizer().encode("P")[0]) == ""
    assert detokenizer.stopped and detokenizer.stop_string == "STOP"
    assert detokenizer.append(50) == "" == detokenizer.flush()


def test_flush_releases_what_was_held():
    pieces, detokenizer = stream(tokenizer().encode("xSTO"), ["STOP"])
    assert pieces[-1] == "STO" and not detokenizer.stopped


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_control_tokens(skip, expected):
    pieces, _ = stream(tokenizer().encode("a<|im_end|>b"), skip_special_tokens=skip)
    assert "".join(pieces) == expected
