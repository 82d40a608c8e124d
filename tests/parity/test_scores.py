"""Scores of pairs equal those of transformers, with the same bits alone and with others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.tiny_bert import (
    make_bert,
    make_reranker,
    make_roberta,
    save_bert,
    vector_of,
    write_bert_gguf,
)

from tiny_gguf import write_tiny_gguf
from twinphase import LLM
from twinphase.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError

QUERY = "the quick brown fox"
DOCUMENTS = [
    "hello world",
    "the lazy dog jumps over the quick brown fox",
    "Über die Brücke läuft ein Mädchen",
    "x",
    "hello [SEP] written out [CLS]",
    "the fox " * 20,
    "hello world",
]


def scores_of(llm, *texts, **options):
    return [output.outputs.score for output in llm.score(*texts, **options)]


def logits_of(model, tokenizer, pairs, **options):
    """The head's numbers, and the ids of each pair."""
    encoded = [
        tokenizer(*pair, return_tensors="pt", return_token_type_ids=True, **options)
        for pair in pairs
    ]
    with torch.no_grad():
        logits = [float(model(**one).logits) for one in encoded]
    return logits, [one["input_ids"][0].tolist() for one in encoded]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    model = make_reranker()
    folder = save_bert(model, tmp_path_factory.mktemp("reranker") / "model")
    return LLM(folder), model, PreTrainedTokenizerFast.from_pretrained(folder)


def test_a_cross_encoder_is_that_of_transformers(reranker):
    """The pooler, both halves of the head, and the second text's token type."""
    llm, model, tokenizer = reranker
    assert (llm.config.task, llm.config.pooling) == ("score", None)
    expected, ids = logits_of(model, tokenizer, [(QUERY, document) for document in DOCUMENTS])
    outputs = llm.score(QUERY, DOCUMENTS)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert np.ptp(expected) > 0.1
    assert scores_of(llm, QUERY, DOCUMENTS, use_activation=False) == pytest.approx(
        expected, abs=1e-5
    )
    sigmoids = torch.tensor(expected).sigmoid().tolist()
    assert [output.outputs.score for output in outputs] == pytest.approx(sigmoids, abs=1e-6)


def test_a_reranker_of_robertas_kind_from_a_folder_and_a_file(tmp_path):
    """Such as bge-reranker-v2-m3: its own head, two separators, one token type."""
    from transformers import PreTrainedTokenizerFast

    model = make_roberta("XLMRobertaForSequenceClassification")
    folder = save_bert(model, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    expected, ids = logits_of(model, tokenizer, pairs)
    assert np.ptp(expected) > 0.1
    file = write_bert_gguf(folder, tmp_path / "model.gguf", 4)
    for path, most in ((folder, 1e-5), (file, 5e-3)):  # the file has float16 matrices
        outputs = LLM(path).score(QUERY, DOCUMENTS, use_activation=False)
        assert [output.prompt_token_ids for output in outputs] == ids
        assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=most)


def test_a_score_has_the_same_bits_alone_and_with_others(reranker):
    llm, _, _ = reranker
    together = scores_of(llm, QUERY, DOCUMENTS * 10)
    assert together == together[: len(DOCUMENTS)] * 10
    alone = [scores_of(llm, QUERY, document)[0] for document in DOCUMENTS]
    assert alone == together[: len(DOCUMENTS)]
    assert scores_of(llm, [QUERY] * len(DOCUMENTS), DOCUMENTS) == alone
    assert scores_of(llm, DOCUMENTS[::-1], DOCUMENTS)[3] == scores_of(llm, "x", "x")[0]


@pytest.mark.parametrize("length", [7, 12, 30, 31])
def test_a_pair_is_truncated_as_by_transformers(reranker, length):
    llm, model, tokenizer = reranker
    pairs = [(QUERY, "the fox " * 30), ("the fox " * 30, QUERY), ("hello " * 40, "world " * 40)]
    expected, ids = logits_of(model, tokenizer, pairs, truncation=True, max_length=length)
    outputs = llm.score(*zip(*pairs, strict=True), truncate_prompt_tokens=length)
    assert [output.prompt_token_ids for output in outputs] == ids
    found = scores_of(
        llm, *zip(*pairs, strict=True), truncate_prompt_tokens=length, use_activation=False
    )
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_embedding_model_scores_by_the_cosine(tmp_path):
    model = make_bert()
    llm = LLM(save_bert(model, tmp_path / "model", "mean"))
    ids = [output.prompt_token_ids for output in llm.embed([QUERY, *DOCUMENTS])]
    query, *documents = (vector_of(model, each, "mean") for each in ids)
    found = llm.score(QUERY, DOCUMENTS)
    assert [output.outputs.score for output in found] == pytest.approx(
        [float(query @ document) for document in documents], abs=1e-6
    )
    assert found[1].prompt_token_ids == ids[0] + ids[2]
    assert scores_of(llm, QUERY, DOCUMENTS[2]) == [found[2].outputs.score]
    assert len(llm.score(QUERY, "fox " * 99, truncate_prompt_tokens=-1)[0].prompt_token_ids) == (
        len(ids[0]) + 64
    )


def test_the_config_names_the_activation(tmp_path):
    folder = save_bert(make_reranker(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())

    def with_activation(name):
        more = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{name}"}}
        (folder / "config.json").write_text(json.dumps(config | more))
        return LLM(folder)

    raw = with_activation("linear.Identity")
    assert scores_of(raw, QUERY, DOCUMENTS) == scores_of(
        raw, QUERY, DOCUMENTS, use_activation=False
    )
    with pytest.raises(UnsupportedModelError, match="activation .*Tanh"):
        with_activation("activation.Tanh")


@pytest.mark.parametrize(
    ("texts", "options", "error", "match"),
    [
        ((QUERY, []), {}, InvalidRequestError, "1 first and 0 second texts"),
        (([], []), {}, InvalidRequestError, "0 first and 0 second"),
        ((["a", "b"], ["a"]), {}, InvalidRequestError, "2 first and 1 second"),
        ((QUERY, ["a", ""]), {}, InvalidRequestError, "Text 1 of text_2 is empty"),
        (([5], "a"), {}, InvalidRequestError, "text_1 is of type list"),
        ((QUERY, ["a", "fox " * 99]), {}, ContextLengthError, "Pair 1 has .*; the model takes 64"),
        ((QUERY, "a"), {"truncate_prompt_tokens": 65}, InvalidRequestError, "is 65. Use 1 to 64"),
        ((QUERY, "\ud800"), {}, InvalidRequestError, "Unicode"),
    ],
)
def test_pairs_that_are_refused(reranker, texts, options, error, match):
    with pytest.raises(error, match=match):
        reranker[0].score(*texts, **options)


def test_models_that_cannot_score(reranker, tmp_path):
    llm_of_pairs, _, _ = reranker
    with pytest.raises(InvalidRequestError, match="loaded to score pairs of texts. Use LLM.score"):
        llm_of_pairs.embed("a")
    with pytest.raises(InvalidRequestError, match="loaded to score .* it writes none"):
        llm_of_pairs.generate("a")
    with pytest.raises(InvalidRequestError, match="loaded to generate text. Load a reranker"):
        LLM(write_tiny_gguf(tmp_path / "tiny.gguf"), backend="reference").score("a", "b")
    with pytest.raises(UnsupportedModelError, match="a head of 3 labels"):
        LLM(save_bert(make_reranker(3), tmp_path / "classifier"))
    # llama.cpp's converter leaves the pooler out.
    folder = llm_of_pairs.checkpoint.path
    file = write_bert_gguf(folder, tmp_path / "half.gguf", 4, without=("cls.weight", "cls.bias"))
    with pytest.raises(UnsupportedModelError, match="lacks the first half of its head"):
        LLM(file)
