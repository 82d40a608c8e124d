"""POST /v1/embeddings, by OpenAI's client: the vectors of `LLM.embed`, and plain refusals."""

from __future__ import annotations

import base64
import json
from unittest.mock import Mock

import numpy as np
import openai
import pytest
from tests.tiny_bert import make_bert, save_bert

from dialects import ANTHROPIC, OLLAMA, OPENAI, PATHS, dialect_of, message, user
from twinphase import LLM
from twinphase.models.tasks import matryoshka_sizes

PATH = "/v1/embeddings"
WRITES_NONE = "embed texts; it writes none. Use /v1/embeddings, or /v1/score."
TEXTS = ["hello world", "the quick brown fox", "Über die Brücke 😀"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_bert(make_bert(), tmp_path_factory.mktemp("bert") / "model", "mean")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "matryoshka_dimensions": [16, 32]}))
    return folder


@pytest.fixture(scope="module")
def embedder(start, folder):
    with start("--served-model-name", "tiny-bert", model=folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder):
    return [np.array(output.outputs.embedding) for output in LLM(folder).embed(TEXTS)]


def test_openais_client_gets_the_vectors(embedder, expected):
    with embedder.client() as client:
        for given in (
            {},
            {"encoding_format": "float"},
            {"encoding_format": "base64"},
            {"dimensions": 48},
        ):
            reply = client.embeddings.create(model="tiny-bert", input=TEXTS, **given)
            vectors = [
                np.frombuffer(base64.b64decode(one.embedding), "<f4")
                if isinstance(one.embedding, str)
                else one.embedding
                for one in reply.data
            ]
            assert np.array_equal(vectors, expected)
            assert (reply.model, [one.index for one in reply.data]) == ("tiny-bert", [0, 1, 2])
        assert client.embeddings.create(model="tiny-bert", input=TEXTS[1]).data[
            0
        ].embedding == list(expected[1])


def test_a_vector_is_cut_where_the_model_was_trained_for_it(embedder, expected):
    """As sentence-transformers' truncate_dim: the first numbers, of length 1 again."""
    for path, key in ((PATH, "data"), ("/api/embed", "embeddings")):
        given = {"model": "tiny-bert", "input": TEXTS, "dimensions": 16}
        found = embedder.post(path, given)[1][key]
        vectors = [one["embedding"] if key == "data" else one for one in found]
        wanted = [vector[:16] / np.linalg.norm(vector[:16]) for vector in expected]
        assert np.allclose(vectors, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"is_matryoshka": True}, []),
        ({"is_matryoshka": False}, None),
        ({"matryoshka_dimensions": [64, 128], "is_matryoshka": True}, [64, 128]),
        ({"matryoshka_dimensions": []}, None),
        (None, None),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(config, sizes):
    assert matryoshka_sizes(Mock(config=config)) == sizes


def test_token_ids_and_usage(embedder, folder, expected):
    ids = [output.prompt_token_ids for output in LLM(folder).embed(TEXTS)]
    for given, vectors in ((ids, expected), (ids[0], expected[:1])):
        status, body = embedder.post(PATH, {"input": given})
        assert status == 200 and np.array_equal([one["embedding"] for one in body["data"]], vectors)
    total = len(ids[0])
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert (
        embedder.metric("embedding_texts_total") > 0
        and embedder.metric("embedding_tokens_total") > total
    )


def test_ollamas_api_gives_them_too(embedder, expected):
    model = "tiny-bert:latest"  # as its clients call it
    body = embedder.post("/api/embed", {"model": model, "input": TEXTS, "truncate": True})[1]
    assert (
        np.array_equal(body["embeddings"], expected)
        and body["prompt_eval_count"] > 0 < body["total_duration"]
    )
    assert embedder.post("/api/embeddings", {"model": model, "prompt": TEXTS[1]})[1] == {
        "embedding": list(expected[1])
    }
    assert embedder.post("/api/show", {"model": model})[1]["capabilities"] == ["embedding"]


TOO_LONG = "hello " * 100
REFUSED = {
    PATH: [
        ({"input": ""}, "Text 0 of `input` is empty"),
        ({"input": ["a", ""]}, "Text 1 of `input` is empty"),
        ({"input": [[1], []]}, "Text 1 of `input` is empty"),
        ({"input": []}, "`input` has 0 texts. Use 1 to 256"),
        ({"input": ["a"] * 257}, "`input` has 257 texts"),
        ({"input": {}}, "`input"),
        ({"input": ["a", 1]}, "`input"),
        ({"input": [200]}, "Token id 200"),
        ({"input": TOO_LONG}, "Text 0 of `input` has 102 tokens; the model takes 64."),
        ({"input": [[1], [1] * 65]}, "Text 1 of `input` has 65 tokens"),
        ({"input": "a", "dimensions": 8}, "48 numbers, and may be cut to 16, 32 only"),
        ({"input": "a", "encoding_format": "int8"}, "only this is supported"),
        ({"input": "a", "truncate": True}, "The field `truncate` is not supported"),
        ({}, "`input`"),
    ],
    "/api/embed": [
        ({"input": TOO_LONG}, "has 102 tokens; the model takes 64"),
        ({"input": []}, "`input` has 0 texts"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
    ],
    "/v1/completions": [({"prompt": "a"}, WRITES_NONE)],
    PATHS[OPENAI]: [({"messages": [user("a")]}, WRITES_NONE)],
    PATHS[ANTHROPIC]: [({"messages": [user("a")], "max_tokens": 1}, WRITES_NONE)],
    PATHS[OLLAMA]: [({"messages": [user("a")]}, WRITES_NONE)],
}


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [(path, fields, part) for path, rows in REFUSED.items() for fields, part in rows],
)
def test_a_bad_request_says_what_is_wrong(embedder, path, fields, part):
    status, body = embedder.post(path, {"model": "tiny-bert", **fields})
    text = message(dialect_of(path), body)
    assert status == 400 and part in text
    if path == PATH:
        code = "context_length_exceeded" if "the model takes" in text else None
        error = body["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)


def test_an_embedding_server_scores_by_the_cosine(embedder, expected):
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    results = embedder.post("/v1/rerank", body)[1]["results"]
    found = {result["index"]: result["relevance_score"] for result in results}
    for index, vector in enumerate(expected[1:]):
        assert found[index] == pytest.approx(float(expected[0] @ vector), abs=1e-6)


def test_an_embedding_server_serves_nothing_else(embedder):
    assert embedder.get("/v1/models")[1]["data"][0]["max_model_len"] == 64
    assert embedder.get("/health/ready")[0] == 200
    assert embedder.post("/tokenize", {"prompt": "hello"})[0] == 200
    assert "48 numbers each, mean pooling" in embedder.log.read_text()
    with embedder.client() as client, pytest.raises(openai.NotFoundError, match="not served"):
        client.embeddings.create(model="other", input="a")


def test_a_generating_server_gives_no_embeddings(server):
    status, reply = server.post(PATH, {"input": "hello"})
    assert status == 400 and "--task embed" in reply["error"]["message"]


def test_a_decoder_embeds_when_it_is_asked_to(start, tiny_path):
    with start("--task", "embed", "--pooling", "mean") as running:
        status, reply = running.post(PATH, {"input": TEXTS})
        assert status == 200
        found = [one["embedding"] for one in reply["data"]]
        alone = running.post(PATH, {"input": TEXTS[2]})[1]["data"][0]["embedding"]
        status, reply = running.post(PATH, {"input": TEXTS, "dimensions": 8})
        assert status == 400 and "does not say that they may be cut" in reply["error"]["message"]
    outputs = LLM(tiny_path, task="embed", pooling="mean").embed(TEXTS)
    assert found == [output.outputs.embedding for output in outputs] and alone == found[2]
