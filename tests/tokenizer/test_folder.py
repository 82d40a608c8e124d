"""Tokenizers of Hugging Face folders give AutoTokenizer's ids; bad folders give one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.tokenizer.tiny_folder import TEXTS, save_folder, tokenizer_of, trained
from tokenizers import decoders

from twinphase.engine.frontends.text import ModelText
from twinphase.errors import (
    CheckpointError,
    ContextLengthError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.safetensors import open_safetensors

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "unk", "pad", "mask")}
KINDS = ["bytes", "spm", "metaspace", "unigram", "bert"]


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    kind = request.param
    return save_folder(
        tmp_path_factory.mktemp(kind), trained(kind), **(BERT if kind == "bert" else NAMES)
    )


@cache
def saved(folder: Path) -> tuple[Any, Tokenizer]:
    return oracle(folder), tokenizer_of(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_equal_those_of_transformers(folder, text):
    theirs, ours = saved(folder)
    plain = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == plain
    if (
        "cls_token" not in ours.special_names
    ):  # WordPiece loses the spaces, so its texts are guesses
        assert ours.decode(plain, skip_special_tokens=False) == theirs.decode(plain)
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
    # Given the control tokens in it, a text is encoded in parts; the ids stay the same.
    ids, starts = ours.encode_with_starts(text)
    control = [(at, i) for at, i in zip(starts, ids, strict=True) if ours.is_special(i)]
    written = [(at, i) for at, i in control if text.startswith(ours.token_bytes(i).decode(), at)]
    assert ids == plain == ours.encode_with_starts(text, control=written)[0]
    without = ours.encode(text, add_special_tokens=False, parse_special=False)
    assert ours.encode_with_starts(text, control=[])[0] == without
    if "unigram" not in folder.name:  # whose model itself knows the names of control tokens
        assert {ours.token_bytes(i) for i in without if ours.is_special(i)} <= {b"<unk>", b"[UNK]"}


def test_special_tokens_equal_those_of_transformers(folder):
    theirs, ours = saved(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert dict(ours.special_names) == theirs.special_tokens_map
    assert {i for i in range(len(theirs)) if ours.is_special(i)} == {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"additional_special_tokens": ["hello"]},
        {"extra_special_tokens": {"image_token": "<tool>"}},
        {"bos_token": "<nowhere>"},
        {"bos_token": {"__type": "AddedToken", "content": "</s>", "special": True}},
        {"added_tokens_decoder": {"404": {"content": "<late>", "special": True}}},
    ],
    ids=str,
)
def test_tokenizer_config_is_read_as_transformers_reads_it(tmp_path, said):
    trained("bytes").save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, **said}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # Older folders have this file, too; it counts where the config lists no added tokens.
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|user|>"}})
    )
    theirs = oracle(tmp_path)
    ours = tokenizer_of(tmp_path)
    for text in ("hello world", "<s>hello</s> <|user|> <tool> <late>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token == theirs.eos_token


def test_every_end_of_an_answer(tmp_path):
    trained("bytes").save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(tmp_path).eos_token_ids == frozenset()
    assert tokenizer_of(tmp_path, text_config={"eos_token_id": 5}).eos_token_ids == {5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMES))
    assert tokenizer_of(tmp_path, eos_token_id=[4, 10_000]).eos_token_ids == {2, 4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    assert tokenizer_of(tmp_path, eos_token_id=4).eos_token_ids == {2, 3, 7}


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    path = tmp_path / "tokenizer.json"
    trained("bytes").save(str(path))
    size = tokenizer_of(tmp_path).vocab_size
    assert tokenizer_of(tmp_path, rows=size + 60).vocab_size == size
    # The last two are added tokens, as Gemma 3's image token, which its models without images have
    # no row for.
    small = tokenizer_of(tmp_path, rows=size - 2)
    assert small.vocab_size == size - 2
    assert small.token_id("<tool>") is None and small.token_id("<|user|>") == 3
    assert max(small.encode("hello<tool> <mask>")) < size - 2
    with pytest.raises(CheckpointError, match=rf"has {size - 2} tokens.* only {size - 3} rows"):
        tokenizer_of(tmp_path, rows=size - 3)


def test_ids_may_have_gaps(tmp_path):
    path = tmp_path / "tokenizer.json"
    trained("bytes").save(str(path))
    content = json.loads(path.read_text())
    content["model"]["vocab"]["behind"] = 900
    path.write_text(json.dumps(content))
    ours = tokenizer_of(tmp_path)
    assert (
        ours.vocab_size == 901
        and ours.token_bytes(899) == b""
        and ours.token_bytes(900) == b"behind"
    )
    with pytest.raises(CheckpointError, match="has 901 tokens"):
        tokenizer_of(tmp_path, rows=900)


def test_a_text_is_refused_by_its_length_only_if_no_tokenizer_could_shorten_it(
    tmp_path,
):
    for kind, refused in (("bytes", True), ("metaspace", True), ("bert", False)):
        folder = save_folder(tmp_path / kind, trained(kind))
        if refused:
            with pytest.raises(ContextLengthError):
                tokenizer_of(folder).encode("a" * 10_000, max_tokens=8)
        else:
            assert len(tokenizer_of(folder).encode(" " * 10_000, max_tokens=8)) == 2


@pytest.mark.parametrize(
    ("files", "error", "match"),
    [
        ({"tokenizer.json": None}, UnsupportedModelError, "has no tokenizer.json. Write one"),
        (
            {"tokenizer.json": None, "vocab.json": "x"},
            UnsupportedModelError,
            "has vocab.json, but no",
        ),
        (
            {"tokenizer.json": None, "tokenizer.model": "x"},
            CheckpointError,
            "not a sound SentencePiece model",
        ),
        ({"tokenizer.json": "{"}, CheckpointError, "not a valid tokenizer"),
        ({"tokenizer.json": "[]"}, CheckpointError, "not a valid tokenizer"),
        (
            {"tokenizer.json": '{"version": "1.0", "model": {"type": "Nothing"}}'},
            CheckpointError,
            "not a valid",
        ),
        ({"tokenizer_config.json": "[1]"}, CheckpointError, "does not hold a JSON object"),
        ({"tokenizer_config.json": "{" * 100_000}, CheckpointError, "not valid JSON"),
        (
            {"tokenizer_config.json": '{"a":' * 100_000 + "1" + "}" * 100_000},
            CheckpointError,
            "not valid JSON",
        ),
        ({"generation_config.json": "\udcff"}, CheckpointError, "not valid JSON"),
    ],
)
def test_bad_folders(tmp_path, files, error, match):
    trained("bytes").save(str(tmp_path / "tokenizer.json"))
    for name, text in files.items():
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=match) as raised:
        tokenizer_of(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_spelling_that_is_not_known_is_refused(tmp_path):
    tokenizer = trained("bytes")
    tokenizer.decoder = decoders.CTC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="'CTC' is not supported"):
        tokenizer_of(tmp_path)


def test_damaged_tokenizers_end_in_an_error_or_work(tmp_path):
    """Anything in place of anything in tokenizer.json and the files beside it."""
    trained("metaspace").save(str(tmp_path / "tokenizer.json"))
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["model"]["merges"] = whole["model"]["merges"][:20]
    others: list[Any] = [None, [], {}, "x", -1, 1e300, [1], {"type": "Sequence"}, True]
    del whole["model"][
        "continuing_subword_prefix"
    ]  # a wrong one ends the process: the library's own fault
    places = [(key,) for key in whole] + [("model", key) for key in whole["model"]]
    for place in places:
        for other in others:
            broken = json.loads(json.dumps(whole))
            inner = broken if len(place) == 1 else broken["model"]
            inner[place[-1]] = other
            (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
            _works_or_says_why(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    keys = [
        *NAMES,
        "add_bos_token",
        "added_tokens_decoder",
        "extra_special_tokens",
        "additional_special_tokens",
    ]
    for key in keys:
        for other in [
            *others,
            {"content": 1},
            {"1": {"content": "<s>", "lstrip": "x"}},
            {"1": None},
            [{}],
        ]:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({**NAMES, key: other}))
            _works_or_says_why(tmp_path)


def _works_or_says_why(folder: Path) -> None:
    try:
        ours = tokenizer_of(folder, rows=700)
        assert all(0 <= i < ours.vocab_size for i in ours.encode("hello <|user|> world"))
    except TwinphaseError as error:
        assert "\n" not in str(error) and error.fix


def test_a_folder_as_transformers_saves_it(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = trained("spm")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 2,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=[2, 3],
    )
    LlamaForCausalLM(config).save_pretrained(str(tmp_path))
    save_folder(
        tmp_path, tokenizer, **NAMES, chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    model = ModelText(open_safetensors(tmp_path, "llama", mark_used=False))
    assert model.tokenizer.eos_token_ids == {2, 3}
    assert model.encode("hello", None)[1] == oracle(tmp_path)("hello")["input_ids"]
    assert model.encode([{"role": "user", "content": "hello"}], None)[0] == "<s>hello"
