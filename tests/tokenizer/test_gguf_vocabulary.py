"""Vocabularies as llama.cpp's converter writes them give the ids of transformers' own classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.tiny_gguf import tiny_vocabulary
from tests.tokenizer.test_tokenizer import random_texts
from tests.tokenizer.tiny_folder import TEXTS, trained
from tests.tokenizer.tiny_tokenizer import byte_level
from tokenizers import Regex, pre_tokenizers

from twinphase.errors import CheckpointError
from twinphase.tokenizer.gguf_vocabulary import build_tokenizer, gguf_facts
from twinphase.tokenizer.kept import keep_tokenizer, load_tokenizer
from twinphase.tokenizer.pretokenizers import PRE_TOKENIZERS
from twinphase.tokenizer.tokenizer import Tokenizer

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
SPACE = "▁"


def from_gguf(
    tokens: list[str], types: list[int], arrays: dict[str, Any] | None = None, **metadata: Any
) -> Tokenizer:
    given = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if key != "name"}
    given["general.name"] = metadata.get("name", "")
    vocabulary = {"tokens": tokens, "token_type": np.array(types, np.int32), **(arrays or {})}
    backend = build_tokenizer(
        given, {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    )
    assert load_tokenizer(keep_tokenizer(backend)).to_str() == backend.to_str()
    return Tokenizer(backend, gguf_facts(given, backend))


# BERT
# ------------------------------------------------------------------------------------------------


def bert(vocab: dict[str, int], **metadata: Any) -> Tokenizer:
    """As llama.cpp's `BertModel.set_vocab` writes it: words with U+2581, control tokens plain."""
    names = sorted(vocab, key=vocab.__getitem__)
    types = [CONTROL if name.startswith("[") and name.endswith("]") else NORMAL for name in names]
    tokens = [
        name if kind == CONTROL else name[2:] if name.startswith("##") else SPACE + name
        for name, kind in zip(names, types, strict=True)
    ]
    ids = {
        "unknown_token_id": vocab["[UNK]"],
        "cls_token_id": vocab["[CLS]"],
        "seperator_token_id": vocab["[SEP]"],
    }
    return from_gguf(tokens, types, model="bert", **{**ids, **metadata})


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_ids_equal_those_of_berttokenizerfast(lowercase):
    from transformers import BertTokenizerFast

    vocab = trained("bert").get_vocab()
    extra = ["Das", "ÉCOLE", "école", "ecole", "##s", "Ü", "##ber", "你", "好"]
    vocab |= {
        token: len(vocab) + i
        for i, token in enumerate(token for token in extra if token not in vocab)
    }
    theirs = BertTokenizerFast(vocab=vocab, do_lower_case=lowercase)
    ours = bert(vocab, **({} if lowercase else {"normalizer.lowercase": False}))
    texts = [
        *TEXTS,
        "École ÉCOLE ecoles",
        "Das über [MASK] x[SEP]y",
        "x" * 100,
        "x" * 101,
        "\u00a0\u200b\x00a\ufffd",
    ]
    for text in [*texts, *random_texts(200)]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert (
            ours.encode(text, add_special_tokens=False)
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
    assert ours.encode("")[:1] == [vocab["[CLS]"]] and ours.encode("")[1:] == [vocab["[SEP]"]]
    assert ours.decode(ours.encode("hello again", add_special_tokens=False)) == "hello again"


def test_a_bert_vocabulary_without_unknown_word_is_refused():
    with pytest.raises(CheckpointError, match="unknown words"):
        from_gguf(["[CLS]", "[SEP]", "▁a"], [CONTROL, CONTROL, NORMAL], model="bert")


# SentencePiece
# ------------------------------------------------------------------------------------------------


def sentencepiece(
    user_defined: tuple[str, ...] = (), model: str = "llama", **metadata: Any
) -> tuple[Tokenizer, dict[str, int]]:
    """A trained vocabulary; scores fall with ids, as in files of SentencePiece's BPE trainer."""
    ids = trained("spm").get_vocab(with_added_tokens=False)
    ids |= {token: len(ids) + i for i, token in enumerate(user_defined)}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|user|>": CONTROL}
    kinds |= dict.fromkeys(user_defined, USER_DEFINED)
    types = [BYTE if token.startswith("<0x") else kinds.get(token, NORMAL) for token in tokens]
    scores = np.array(
        [0.0 if kind != NORMAL else -float(i) for i, kind in enumerate(types)], np.float32
    )
    arrays: dict[str, Any] = {"scores": scores}
    if model == "gemma4":
        arrays = {"merges": [" ".join(pair) for pair in merges_of(ids)]}
        metadata |= {"unknown_token_id": ids["<unk>"], "bos_token_id": 1, "eos_token_id": 2}
    return from_gguf(tokens, types, arrays, model=model, **metadata), ids


def merges_of(ids: dict[str, int]) -> list[tuple[str, str]]:
    from transformers.convert_slow_tokenizer import generate_merges

    pieces = {
        token: i for token, i in ids.items() if not (token.startswith("<") and token.endswith(">"))
    }
    merges: list[tuple[str, str]] = generate_merges(
        pieces, {token: -float(i) for token, i in pieces.items()}
    )
    return merges


@pytest.mark.parametrize("model", ("llama", "gemma4"))
def test_sentencepiece_ids_equal_those_of_gemmatokenizer(model):
    from transformers import GemmaTokenizer

    # Gemma's files put no space before a text; runs of spaces are tokens of their own, which the
    # converter writes so.
    ours, ids = sentencepiece(
        user_defined=("\n\n", "  "), model=model, add_space_prefix=False, add_bos_token=True
    )
    theirs = GemmaTokenizer(vocab=ids, merges=merges_of(ids), bos_token="<s>", eos_token="</s>")
    theirs.add_tokens(["\n\n", "  "])
    if model == "gemma4":  # llama.cpp's rule; no token of the real vocabulary has both.
        split = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
        theirs.backend_tokenizer.pre_tokenizer = split
    for text in [*TEXTS, *random_texts(300)]:
        # Its class finds added tokens behind the normalizer, so in spaces made of U+2581, too.
        if any(name in text for name in ("<s>", "</s>", "<|user|>", SPACE)):
            continue
        assert (
            ours.encode(text, add_special_tokens=False)
            == theirs(text, add_special_tokens=False)["input_ids"]
        ), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("hello")[0] == 1 and not ours.strips_leading_space


def test_sentencepiece_ids_equal_those_of_llamatokenizer():
    from transformers import LlamaTokenizer

    ours, ids = sentencepiece()
    theirs = LlamaTokenizer(vocab=ids, merges=merges_of(ids))
    for text in [*TEXTS, *random_texts(300)]:
        # Its newer class takes a U+2581 in a text for a space that is there already.
        if (
            any(name in text for name in ("<s>", "</s>", "<|user|>"))
            or text.startswith(("▁", " "))
            or not text
        ):
            continue
        assert (
            ours.encode(text, add_special_tokens=False)
            == theirs(text, add_special_tokens=False)["input_ids"]
        ), text
        assert ours.decode(ours.encode(text)) == text


def test_control_tokens_of_phi3_swallow_the_space_behind_them():
    for name, swallows in (("Phi 3 Mini", False), ("Phi-3-mini-4k-instruct", True), ("phi3", True)):
        ours, ids = sentencepiece(name=name)
        user = ids["<|user|>"]
        with_newline = ours.encode("<|user|>\nhello", add_special_tokens=False)
        assert (with_newline == ours.encode("<|user|>hello", add_special_tokens=False)) == swallows
        assert ours.encode_with_starts("<|user|>\nhello", control=[(0, user)])[0] == with_newline
        assert ours.encode("<s>\nhello") != ours.encode("<s>hello")


# Byte-level BPE
# ------------------------------------------------------------------------------------------------


def splits(pre: str, text: str) -> list[str]:
    return [piece for piece, _ in byte_level(pre)._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_words_are_split_as_transformers_splits_them_for_the_same_name():
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = mapping.GGUF_PRE_TOKENIZER_SPLITS
    families = {"llama-bpe", "dbrx", "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o"}
    assert families <= set(known) & set(PRE_TOKENIZERS)
    for pre in set(known) & set(PRE_TOKENIZERS):
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(known[pre]), behavior="isolated")
        theirs = pre_tokenizers.Sequence([split, to_bytes])
        for text in [*TEXTS, *random_texts(100)]:
            assert splits(pre, text) == [piece for piece, _ in theirs.pre_tokenize_str(text)], (
                pre,
                text,
            )


@pytest.mark.parametrize("pre", ["gpt-2", "olmo"])
def test_words_are_split_as_by_gpt2(pre):
    for text in [*TEXTS, *random_texts(100)]:
        own = pre_tokenizers.ByteLevel(
            add_prefix_space=False
        )  # with GPT-2's expression, written in Rust
        assert splits(pre, text) == [piece for piece, _ in own.pre_tokenize_str(text)], text


def test_words_are_split_as_by_smollm_and_granite():
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in [*TEXTS, *random_texts(100)]:
        for pre in ("smollm", "refact", "starcoder"):
            assert splits(pre, text) == [piece for piece, _ in theirs.pre_tokenize_str(text)], text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("deepseek-llm", "def| fib|(|12345|):|Ċ| | x| =| '|it|'|s|'"),
        ("deepseek-coder", "def| fib|(|1|2|3|4|5|):|Ċ| | x| =| '|it|'|s|'"),
        ("deepseek-v3", "def| fib|(|123|45|):Ċ| | x| =| '|it|'s|'"),
    ],
)
def test_words_are_split_as_by_deepseek(pre, expected):
    """Written down from what gives transformers' ids on llama.cpp's files of these vocabularies."""
    assert "|".join(splits(pre, "def fib(12345):\n  x = 'it's'")) == expected.replace(" ", "Ġ")


def test_a_string_that_stands_in_gemma_4s_vocabulary_twice_is_the_last_of_them():
    tokens = ["<unk>", "<s>", "a", "b", "a", "ba"]
    types = [UNKNOWN, CONTROL, *[NORMAL] * 4]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "add_bos_token": True}
    ours = from_gguf(tokens, types, {"merges": ["b a"]}, model="gemma4", **ids)
    assert ours.encode("aba") == [1, 4, 5]


def test_every_end_of_an_answer():
    tokens, types, merges = tiny_vocabulary(320)

    def ends(*names: str) -> set[str]:
        renamed = [*tokens[: len(tokens) - len(names)], *names]
        kinds = [*types[: len(types) - len(names)], *[CONTROL] * len(names)]
        model = from_gguf(
            renamed, kinds, {"merges": merges}, model="gpt2", pre="gpt-4o", eos_token_id=0
        )
        return {renamed[i] for i in model.eos_token_ids}

    assert ends() == {"<|endoftext|>", "<|im_end|>"}
    assert "<|end|>" in ends("<|end|>")  # Phi's end of turn
    # GPT-OSS's end of a message, behind which comes the next: "<|return|>" and "<|call|>" end the
    # answer.
    assert ends("<|return|>", "<|call|>", "<|end|>") == {
        "<|endoftext|>",
        "<|im_end|>",
        "<|return|>",
        "<|call|>",
    }
