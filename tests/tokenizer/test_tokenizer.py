"""Token ids equal those of independent implementations, and the edges of encoding and decoding."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_gguf import CONTROL_TOKENS, tiny_vocabulary, write_tiny_gguf
from tests.tokenizer.tiny_tokenizer import byte_level

from twinphase.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
)
from twinphase.tokenizer.gguf_vocabulary import build_tokenizer, gguf_facts
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.gguf import open_gguf
from twinphase.weights.hub import resolve_model

EXPECTED = json.loads(
    (Path(__file__).parents[1] / "data" / "tokenizer_expectations.json").read_text()
)
TEXTS: list[str] = EXPECTED["texts"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_gguf(resolve_model()))


@pytest.fixture
def cache_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts that mix scripts, spaces, digits, code and control tokens at random."""
    rng = random.Random(seed)
    alphabets = [
        *(
            "abcdefghij klmnop  \n\t",
            "ABCdef'sS'llLL'rE 0123456789",
            "世界你好漢字かなカナ한국어ㄱㄴ",
        ),
        *(
            "😀🎉👩‍👩‍👧‍👦🇩🇪✈️☃︎",
            "éàüßøñç ÀÉ ﬁ ﬀ",
            "العربية עברית हिन्दी ไทย தமிழ்",
            "\u00a0\u2003\u200b\u3000\r\n\v\f ",
        ),
        *(
            "!?.,;:'\"`~@#$%^&*()[]{}<>|\\/_-+=",
            "²³½¾①②Ⅷ٣४৭𝟙",
            "\x01\x7f\x85\u2028\ufeff\ufffd",
            "𝓗𝔢𝕝𝕝𝕠🀄𐍈",
        ),
    ]
    chunks = [" the", " don't", "\n\n", "def f(x):", "    ", *CONTROL_TOKENS, "<repo_name>"]
    texts = []
    for _ in range(count):
        letters = "".join(rng.sample(alphabets, rng.randint(1, 4)))
        pieces = [
            rng.choice(letters) if rng.random() < 0.9 else rng.choice(chunks)
            for _ in range(rng.randint(1, 60))
        ]
        texts.append("".join(pieces))
    return texts


@pytest.mark.model
@pytest.mark.parametrize("i", range(len(TEXTS)))
def test_ids_equal_the_stored_ones_of_llama_cpp(smollm2, i):
    text = TEXTS[i]
    assert smollm2.encode(text) == EXPECTED["ids"]["smollm"][i]
    assert smollm2.encode(text, parse_special=False) == EXPECTED["plain"][i]


@pytest.mark.model
@pytest.mark.parametrize("pre", EXPECTED["ids"])
def test_every_kind_of_pre_tokenizer_splits_as_llama_cpp(pre):
    checkpoint = open_gguf(resolve_model())
    tokenizer = build_tokenizer(
        {**checkpoint.metadata, "tokenizer.ggml.pre": pre}, checkpoint.vocabulary()
    )
    for text, expected in zip(TEXTS, EXPECTED["ids"][pre], strict=True):
        if pre == "qwen2" and text.startswith("decomposed"):
            # the model's own tokenizer composes characters first (NFC), llama.cpp does not
            continue
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.model
@pytest.mark.slow
def test_ids_equal_those_of_transformers(smollm2):
    transformers = pytest.importorskip("transformers")
    path = resolve_model()
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # Its conversion of GGUF files forgets that this model splits numbers into digits, so only texts
    # without any.
    digits = re.compile(r"[\d²³½¾①②Ⅷ]")
    texts = [t for t in TEXTS + random_texts(2000) if not digits.search(t)]
    assert len(texts) > 1000
    for text in texts:
        assert smollm2.encode(text) == oracle(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.model
def test_decoding_gives_the_text_back(smollm2):
    for text in TEXTS + random_texts(500):
        if any(ord(c) < 32 and c not in "\n\r\t\v\f" or c == "\x7f" for c in text):
            continue  # the vocabulary lacks some control characters
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


@pytest.mark.model
def test_special_ids(smollm2):
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.vocab_size) == (1, 2, 49152)
    assert smollm2.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.is_special(2) and not smollm2.is_special(100)
    assert smollm2.decode([1, 2]) == ""
    assert smollm2.token_bytes(49152) == b"" == smollm2.token_bytes(-1)


@pytest.mark.model
@pytest.mark.parametrize("text", ["A", " ", "7", "ab ", "😀", "\n"])
def test_a_very_long_text_does_not_hang(smollm2, text):
    long = text * (300_000 // len(text))
    assert smollm2.decode(smollm2.encode(long)) == long
    with pytest.raises(ContextLengthError, match="characters"):
        smollm2.encode("A" * 50_000_000, max_tokens=8192)


@given(st.text())
def test_any_text_survives_a_byte_level_vocabulary(text):
    tokenizer = byte_level("smollm")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@settings(deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(["<|im_end|>", " the", "😀", "e\u0301", "\n", "<s>", "hello"])).map(
        "".join
    )
)
def test_starts_are_where_tokens_begin(text):
    tokenizer = byte_level("smollm")
    ids, starts = tokenizer.encode_with_starts(text)
    assert ids == tokenizer.encode(text)
    done = 0
    for i, start in zip(ids, starts, strict=True):
        assert len(text[:start].encode()) <= done < len(text[: start + 1].encode())
        done += len(tokenizer.token_bytes(i))
    for other in (tokenizer, byte_level("qwen2"), sentencepiece()):
        ids, starts = other.encode_with_starts(text)
        assert ids == other.encode(text, add_special_tokens=False)
        assert starts == sorted(starts) and all(0 <= start < len(text) for start in starts)
        # Given all its control tokens, a text is encoded as without being told; given none, as
        # plain text.
        control = [(at, i) for at, i in zip(starts, ids, strict=True) if other.is_special(i)]
        assert other.encode_with_starts(text, control=control) == (ids, starts)
        plain = other.encode(text, add_special_tokens=False, parse_special=False)
        assert other.encode_with_starts(text, control=[])[0] == plain


def test_long_texts_are_encoded_as_short_ones():
    text = " hello<|im_end|>"
    for tokenizer in (
        byte_level("smollm"),
        sentencepiece(add_space_prefix=False, add_bos_token=False),
    ):
        for parse in (True, False):
            once = tokenizer.encode(text, add_special_tokens=False, parse_special=parse)
            assert (
                tokenizer.encode(text * 500, add_special_tokens=False, parse_special=parse)
                == once * 500
            )


def test_some_control_tokens_are_read_and_others_are_not():
    tokenizer = byte_level("smollm")
    ids, starts = tokenizer.encode_with_starts("a<|im_end|>b<|im_end|>c", control=[(12, 2)])
    assert [i for i in ids if tokenizer.is_special(i)] == [2] and starts[ids.index(2)] == 12
    assert tokenizer.decode(ids) == "a<|im_end|>bc"
    for encode in (tokenizer.encode, tokenizer.encode_with_starts):
        with pytest.raises(InvalidRequestError, match="not valid Unicode"):
            encode("broken \udcff byte")
    with pytest.raises(ContextLengthError):
        tokenizer.encode_with_starts("a" * 1000, max_tokens=2)


def test_the_tokenizer_is_cached_and_rebuilt_when_damaged(tmp_path, cache_folder):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    ids = Tokenizer.from_checkpoint(open_gguf(path)).encode("the <|im_end|> world")
    (cached,) = cache_folder.rglob("tokenizer-*")
    content = cached.read_bytes()
    # Loaded from the cache, the vocabulary is not read.
    checkpoint = open_gguf(path)
    object.__setattr__(checkpoint, "vocabulary", lambda: pytest.fail("read the vocabulary"))
    assert Tokenizer.from_checkpoint(checkpoint).encode("the <|im_end|> world") == ids
    for damaged in (b"", content[: len(content) // 2], content.replace(b"merges", b"merged")):
        cached.write_bytes(damaged)
        assert Tokenizer.from_checkpoint(open_gguf(path)).encode("the <|im_end|> world") == ids
        assert cached.read_bytes() == content
    # Another file under the same name is another tokenizer.
    write_tiny_gguf(path, vocab=400, layers=1)
    assert Tokenizer.from_checkpoint(open_gguf(path)).vocab_size == 400


@pytest.mark.usefixtures("cache_folder")
def test_tokens_added_where_the_model_wants_them(tmp_path):
    checkpoint = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    vocabulary = checkpoint.vocabulary()

    def tokenizer(**metadata: Any) -> Tokenizer:
        given = {
            **checkpoint.metadata,
            **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()},
        }
        backend = build_tokenizer(given, vocabulary)
        return Tokenizer(backend, gguf_facts(given, backend))

    plain = tokenizer().encode("hello")
    assert tokenizer(add_bos_token=True, add_eos_token=True).encode("hello") == [1, *plain, 2]
    assert tokenizer(add_bos_token=True).encode("hello", add_special_tokens=False) == plain
    assert tokenizer(eot_token_id=7).eos_token_ids == {0, 2, 7}
    with pytest.raises(CheckpointError, match="bos_token_id 999"):
        tokenizer(bos_token_id=999)


TOKENS, TYPES, MERGES = tiny_vocabulary(320)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model": "rwkv"}, UnsupportedModelError, "'rwkv'"),
        ({"pre": "kimi-k2"}, UnsupportedModelError, "'kimi-k2'"),
        ({"merges": None}, CheckpointError, "tokenizer.ggml.merges"),
        ({"merges": ["zz yy"]}, CheckpointError, "inconsistent"),
        ({"merges": ["zz"]}, CheckpointError, "two tokens"),
        ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, CheckpointError, "same token twice"),
        ({"token_type": np.array(TYPES[:-1])}, CheckpointError, "token_type"),
    ],
)
def test_bad_vocabularies(change, error, match):
    given = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": np.array(TYPES),
        "merges": MERGES,
    }
    given = {f"tokenizer.ggml.{key}": value for key, value in {**given, **change}.items()}
    with pytest.raises(error, match=match):
        build_tokenizer(given, given)


# SentencePiece
# ------------------------------------------------------------------------------------------------


@cache
def sentencepiece(**extra: Any) -> Tokenizer:
    words = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "ll",
        "he",
        "hell",
        "hello",
        "▁h",
        "▁he",
        "▁hello",
        "lo",
        "w",
        "▁w",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in (90, 91, 92, 93, 94, 1, 2, 3, 4, 5, 6, 7, 8, 95, 9)]
    arrays = {
        "tokens": tokens,
        "token_type": np.array(types),
        "scores": np.array(scores, np.float32),
    }
    metadata = {
        "tokenizer.ggml.model": "llama",
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
    backend = build_tokenizer(metadata, {f"tokenizer.ggml.{k}": v for k, v in arrays.items()})
    return Tokenizer(backend, gguf_facts(metadata, backend))


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = sentencepiece()
    pieces = [tokenizer._backend.id_to_token(i) for i in tokenizer.encode("hello wé")]
    # "ll" first (best score), then "he", "hell", "hello"; "▁hello" last.
    assert pieces == ["<s>", "▁hello", "▁w", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello wé")) == "hello wé"
    assert tokenizer.decode(tokenizer.encode("hello"), continuation=True) == " hello"
    assert tokenizer.decode([3 + 0xC3]) == "\ufffd"
    assert tokenizer.eos_token_ids == {2}


def test_sentencepiece_space_prefix_is_the_files_choice():
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert [tokenizer._backend.id_to_token(i) for i in tokenizer.encode("hello")] == ["hello"]


@pytest.mark.usefixtures("cache_folder")
def test_a_file_without_tokenizer_is_refused(tmp_path):
    checkpoint = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"))
    bare = {
        key: value for key, value in checkpoint.metadata.items() if not key.startswith("tokenizer.")
    }
    with pytest.raises(UnsupportedModelError, match="no tokenizer"):
        Tokenizer.from_checkpoint(replace(checkpoint, metadata=bare))
