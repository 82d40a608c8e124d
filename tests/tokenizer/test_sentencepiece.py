"""Folders with only a tokenizer.model: ids and texts equal those of the sentencepiece package."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tokenizer.tiny_folder import CORPUS, TEXTS, tokenizer_of

from twinphase.errors import CheckpointError, TwinphaseError, UnsupportedModelError

spm = pytest.importorskip("sentencepiece", reason="of the test extra")

LLAMA = {
    "model_type": "bpe",
    "vocab_size": 480,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "control_symbols": ["<|user|>"],
}
# No space in front, runs of spaces and newlines as pieces of their own; one digit a piece.
GEMMA = LLAMA | {
    "add_dummy_prefix": False,
    "user_defined_symbols": ["\n\n", "\n", "▁▁", "▁▁▁", "<mask>"],
    "split_digits": True,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
}
KINDS = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "bpe-nmt": {"model_type": "bpe", "vocab_size": 200},
    "unigram": {"model_type": "unigram", "vocab_size": 420, "byte_fallback": True},
    "unigram-identity": LLAMA
    | {"model_type": "unigram", "vocab_size": 160, "byte_fallback": False},
}


def train(**options: Any) -> bytes:
    written = io.BytesIO()
    given = {
        "sentence_iterator": iter(CORPUS),
        "model_writer": written,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    spm.SentencePieceTrainer.train(**given, **options)
    return written.getvalue()


@pytest.fixture(scope="module", params=KINDS)
def model(request) -> tuple[str, bytes]:
    return request.param, train(**KINDS[request.param])


def random_texts(count: int) -> list[str]:
    import random

    rng = random.Random(0)
    characters = [
        *"abcdefgh helo wrd  \n.,'19",
        "ü",
        "世",
        "é",
        "e\u0301",
        "ﬁ",
        "　",
        "\u00a0",
        "😀",
        "▁",
        "\t",
        "½",
    ]
    return ["".join(rng.choices(characters, k=rng.randint(1, 60))) for _ in range(count)]


def test_ids_and_texts_equal_those_of_sentencepiece(tmp_path, model):
    kind, proto = model
    (tmp_path / "tokenizer.model").write_bytes(proto)
    theirs = spm.SentencePieceProcessor(model_proto=proto)
    ours = tokenizer_of(tmp_path)
    assert ours.vocab_size == theirs.get_piece_size() and ours.strips_leading_space == (
        kind != "gemma"
    )
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    assert ours.special_names["unk_token"] == theirs.id_to_piece(theirs.unk_id())
    num_compared = 0
    for text in [*TEXTS, *random_texts(500)]:
        if "unigram" in kind and "<" in text:
            # a name of a control token is found in any text; see `pipeline.without_special`
            continue
        expected = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == expected, text
        if theirs.unk_id() not in expected:
            assert ours.decode(expected) == theirs.decode(expected), text
            num_compared += 1
    assert num_compared > 5
    assert ours.encode("hello") == [theirs.bos_id(), *theirs.encode("hello")]
    control = ours.encode("<s>hello</s>", add_special_tokens=False)
    assert control == [theirs.bos_id(), *theirs.encode("hello"), theirs.eos_id()]


def test_the_folder_says_what_is_special_and_added(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(train(**LLAMA))
    size = tokenizer_of(tmp_path).vocab_size
    said = {
        "bos_token": "</s>",
        "eos_token": {"content": "<|end|>"},
        "add_eos_token": True,
        "added_tokens_decoder": {str(size): {"content": "<|end|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = tokenizer_of(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (
        2,
        size,
        size + 1,
    )
    ids = tokenizer.encode("hello")
    assert ids[0] == 2 and ids[-1] == size and tokenizer.decode(ids) == "hello"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**said, "add_bos_token": False}))
    assert tokenizer_of(tmp_path).encode("hello") == ids[1:]
    with pytest.raises(CheckpointError, match="only 100 rows"):
        tokenizer_of(tmp_path, rows=100)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model_type": "word"}, "an algorithm other than BPE and Unigram"),
        ({"treat_whitespace_as_suffix": True}, "spaces at the end of words"),
        ({"user_defined_symbols": ["▁▁"]}, "user-defined pieces with spaces"),
    ],
)
def test_settings_that_would_change_the_ids_are_refused(tmp_path, options, match):
    (tmp_path / "tokenizer.model").write_bytes(
        train(**{"model_type": "bpe", "vocab_size": 150, **options})
    )
    with pytest.raises(UnsupportedModelError, match=match):
        tokenizer_of(tmp_path)


def test_damaged_files_end_in_an_error_or_work(tmp_path):
    path = tmp_path / "tokenizer.model"
    whole = train(**LLAMA)
    for text in (
        b"",
        b"IQ== 0\nIg== 1\n",
        whole[:-3],
        b"\x0a" + b"\xff" * 20,
        b"\x0f",
    ):  # the second is tiktoken's
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match="not a sound SentencePiece model"):
            tokenizer_of(tmp_path)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, len(whole) - 1), st.binary(max_size=12), st.integers(0, 12))
    def check(at, new, dropped) -> None:
        path.write_bytes(whole[:at] + new + whole[at + dropped :])
        try:
            tokenizer = tokenizer_of(tmp_path)
        except TwinphaseError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(tokenizer.decode(tokenizer.encode("hello world")), str)

    check()
