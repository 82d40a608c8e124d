from __future__ import annotations

import io

import pytest

from twinphase.chat.wrapping import UNWRAPPED, WrappedOutput


def written(pieces: list[str], columns: int | None) -> str:
    stream = io.StringIO()
    output = WrappedOutput(stream, columns)
    for piece in pieces:
        output.write(piece)
    output.close()
    return stream.getvalue()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["The sk", "y is b", "lue."], "The sky is\nblue."),
        (["one two\n  three"], "one two\n  three"),
        (["averyveryverylongword x"], "averyveryverylongword\nx"),
        (["a\n\nb"], "a\n\nb"),
        (["日本語 日本語"], "日本語\n日本語"),
    ],
)
def test_lines_are_broken_between_words(pieces, expected):
    assert written(pieces, 10) == expected


@pytest.mark.parametrize("columns", [None, UNWRAPPED])
def test_elsewhere_the_text_stays_as_it_is(columns):
    text = " a long line of words" * 20 + "\n\tand  more"
    assert written([text[:7], text[7:]], columns) == text
