"""POST /v1/rerank and /v1/score: the scores of `LLM.score` in vLLM's shapes, and plain refusals."""

from __future__ import annotations

import pytest
from tests.tiny_bert import make_reranker, save_bert

from dialects import OPENAI, message
from twinphase import LLM

QUERY = "the quick brown fox"
DOCUMENTS = ["hello world", "the lazy dog jumps over the quick brown fox", "Über die Brücke 😀"]
RERANK = "/v1/rerank"
SCORE = "/v1/score"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bert(make_reranker(), tmp_path_factory.mktemp("reranker") / "model")


@pytest.fixture(scope="module")
def reranker(start, folder):
    with start("--served-model-name", "tiny-reranker", model=folder) as running:
        yield running


@pytest.fixture(scope="module")
def outputs(folder):
    return LLM(folder).score(QUERY, DOCUMENTS)


@pytest.fixture(scope="module")
def scores(outputs):
    return [output.outputs.score for output in outputs]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_best_documents_come_first(reranker, outputs, scores, path):
    body = {"model": "tiny-reranker", "query": QUERY, "documents": DOCUMENTS}
    status, reply = reranker.post(path, body)
    order = sorted(range(3), key=lambda index: -scores[index])
    assert status == 200 and reply.pop("id").startswith("rerank-")
    total = sum(len(output.prompt_token_ids) for output in outputs)
    assert reply == {
        "model": "tiny-reranker",
        "usage": {"prompt_tokens": total, "total_tokens": total},
        "results": [
            {"index": i, "document": {"text": DOCUMENTS[i]}, "relevance_score": scores[i]}
            for i in order
        ],
    }
    objects = [{"text": document} for document in DOCUMENTS]
    best = reranker.post(path, body | {"documents": objects, "top_n": 1, "user": "u"})[1]
    assert best["results"] == reply["results"][:1]
    bare = reranker.post(path, body | {"top_n": 9, "return_documents": False})[1]
    assert bare["results"] == [{"index": i, "relevance_score": scores[i]} for i in order]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_have_vllms_shape(reranker, scores, path):
    before = reranker.metric("embedding_texts_total")
    status, reply = reranker.post(path, {"text_1": QUERY, "text_2": DOCUMENTS})
    assert status == 200 and reply["object"] == "list" and reply["id"].startswith("score-")
    assert reply["data"] == [
        {"index": i, "object": "score", "score": score} for i, score in enumerate(scores)
    ]
    assert reranker.metric("embedding_texts_total") == before + 3
    one = {"text_1": QUERY, "text_2": DOCUMENTS[1]}
    assert reranker.post(path, one)[1]["data"][0]["score"] == scores[1]
    pairs = {"text_1": [QUERY] * 3, "text_2": DOCUMENTS, "use_activation": False}
    raw = [each["score"] for each in reranker.post(path, pairs)[1]["data"]]
    assert sorted(range(3), key=raw.__getitem__) == sorted(range(3), key=scores.__getitem__)
    assert raw != scores
    long = {"text_1": QUERY, "text_2": "hello " * 100, "truncate_prompt_tokens": -1}
    assert reranker.post(path, long)[1]["usage"]["prompt_tokens"] == 64


REFUSED = [
    (RERANK, {"query": "", "documents": ["a"]}, "Text 0 of `query` is empty"),
    (RERANK, {"query": "a", "documents": []}, "`documents` has 0 texts. Use 1 to 256"),
    (RERANK, {"query": "a", "documents": ["a", ""]}, "Text 1 of `documents` is empty"),
    (RERANK, {"query": "a", "documents": ["a"] * 257}, "`documents` has 257 texts"),
    (RERANK, {"query": "a", "documents": "a"}, "`documents"),
    (RERANK, {"query": "a", "documents": [1]}, "`documents"),
    (RERANK, {"query": ["a"], "documents": ["a"]}, "`query"),
    (RERANK, {"query": "a"}, "`documents`"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "`top_n`"),
    (RERANK, {"query": "a", "documents": ["a"], "rank_fields": ["b"]}, "`rank_fields` is not"),
    (RERANK, {"query": "a", "documents": ["a", "hello " * 100]}, "Pair 1 has 104 tokens; the"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "2 first and 3 second texts"),
    (SCORE, {"text_1": "a", "text_2": []}, "`text_2` has 0 texts"),
    (SCORE, {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": 65}, "is 65. Use 1 to 64"),
    (SCORE, {"text_1": "a", "text_2": "a", "truncate_prompt_tokens": -2}, "`truncate_prompt_"),
    (
        "/v1/embeddings",
        {"input": "a"},
        "score pairs of texts; it gives no embeddings here. Use /v1",
    ),
    ("/v1/completions", {"prompt": "a"}, "it writes none. Use /v1/rerank or /v1/score."),
]


@pytest.mark.parametrize(("path", "fields", "part"), REFUSED)
def test_a_bad_request_says_what_is_wrong(reranker, path, fields, part):
    status, body = reranker.post(path, {"model": "tiny-reranker", **fields})
    text = message(OPENAI, body)
    assert status == 400 and part in text
    code = "context_length_exceeded" if "the model takes" in text else None
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", code)


def test_what_a_reranker_says_of_itself(reranker):
    assert "scores     pairs of texts of up to 64 tokens" in reranker.log.read_text()
    assert reranker.post("/api/show", {"model": "tiny-reranker"})[1]["capabilities"] == ["rerank"]
    assert reranker.get("/health/ready")[0] == 200
    assert reranker.post(SCORE, {"model": "other", "text_1": "a", "text_2": "a"})[0] == 404


def test_a_generating_server_names_models_that_score(server):
    for path, body in (
        (RERANK, {"query": "a", "documents": ["a"]}),
        (SCORE, {"text_1": "a", "text_2": "a"}),
    ):
        status, reply = server.post(path, body)
        text = reply["error"]["message"]
        assert status == 400 and "scores no texts here" in text and "ms-marco-minilm" in text
