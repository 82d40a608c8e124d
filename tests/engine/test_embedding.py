"""The errors of an embedding model, and equal vectors from all front ends."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from tests.tiny_bert import make_bert, save_bert, write_bert_gguf

from twinphase import LLM, AsyncEngine, SamplingParams
from twinphase.engine.embedding.loop import EmbeddingLoop
from twinphase.engine.process.messages import Embed, Embedded
from twinphase.errors import (
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnsupportedModelError,
)

TEXTS = ["hello world", "the quick brown fox", "Über die Brücke 😀"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_cache):
    return save_bert(make_bert(), tmp_path_factory.mktemp("bert") / "model", "mean")


@pytest.fixture(scope="module")
def encoder(folder):
    return LLM(folder)


def test_outputs_have_vllms_shape(encoder):
    (one,) = encoder.embed("hello world")
    assert one.finished and one.outputs.hidden_size == len(one.outputs.embedding) == 48
    assert one.prompt_token_ids == encoder.tokenizer.encode("hello world")
    same = encoder.embed([{"prompt": "hello world"}, {"prompt_token_ids": one.prompt_token_ids}])
    assert [output.outputs for output in same] == [one.outputs] * 2
    assert len({output.request_id for output in (one, *same)}) == 3
    assert encoder.embed([]) == []


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", InvalidRequestError, "empty"),
        ([[]], InvalidRequestError, "no tokens"),
        ([[1, 200]], InvalidRequestError, "Token id 200 .* Use integers from 0 to 199"),
        ([[1, -1]], InvalidRequestError, "Token id -1"),
        ([[1] * 65], ContextLengthError, "65 tokens; the model takes 64. Shorten it by 1 tokens"),
        ("hello " * 100, ContextLengthError, "the model takes 64"),
        ("\ud800", InvalidRequestError, "Unicode"),
        (5, InvalidRequestError, "type int"),
    ],
)
def test_texts_that_are_refused(encoder, prompt, error, match):
    with pytest.raises(error, match=match):
        encoder.embed(prompt)


def test_an_encoder_writes_no_text(encoder, folder):
    for call in (
        encoder.generate,
        encoder.stream,
        lambda text: encoder.chat([{"role": "user", "content": text}]),
    ):
        with pytest.raises(InvalidRequestError, match="writes none. Use LLM.embed"):
            call("hello")
    with pytest.raises(InvalidRequestError, match="encoder"):
        LLM(folder, task="generate")


def test_a_generating_model_embeds_only_when_loaded_for_it(llm, make_llm):
    with pytest.raises(InvalidRequestError, match='Load it with task="embed"'):
        llm.embed("hello")
    with pytest.raises(
        InvalidRequestError, match="pooling is 'mean', but .* is loaded to generate"
    ):
        make_llm(pooling="mean")
    embedder = make_llm(task="embed")
    assert embedder.config.pooling == "last"
    with pytest.raises(InvalidRequestError, match="writes none"):
        embedder.generate("hello", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("itl_slo_ms", 50.0, "embedding"),
        ("trace_file", "log", "embedding"),
        ("num_kv_blocks", 8, "embedding"),
        ("threads", 2, "encoder"),
        ("tensor_parallel_size", 2, "encoder"),
        ("isa", "avx2", "encoder"),
        ("kv_cache_dtype", "int8", "encoder"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(folder, name, value, kind):
    with pytest.raises(InvalidRequestError, match=f"{name} is .*{kind} has no use for it"):
        LLM(folder, **{name: value})


def test_a_shorter_limit_is_kept(folder):
    with pytest.raises(ContextLengthError, match="the model takes 5"):
        LLM(folder, max_model_len=5).embed([[1] * 6])
    with pytest.raises(InvalidRequestError, match="at most 64"):
        LLM(folder, max_model_len=65)


def edited(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "fields", "error", "match"),
    [
        ("config.json", {"hidden_act": "relu"}, UnsupportedModelError, "hidden_act 'relu'"),
        ("config.json", {"is_decoder": True}, UnsupportedModelError, "made a decoder"),
        (
            "config.json",
            {"position_embedding_type": "relative_key"},
            UnsupportedModelError,
            "relative_key",
        ),
        ("config.json", {"num_attention_heads": 5}, CheckpointError, "does not divide by 5 heads"),
        ("config.json", {"num_hidden_layers": 4}, CheckpointError, "no tensor blk.3.attn_q.weight"),
        (
            "config.json",
            {"intermediate_size": 81},
            CheckpointError,
            "blk.0.ffn_up.weight has shape",
        ),
        (
            "config.json",
            {"max_position_embeddings": "many"},
            CheckpointError,
            "max_position_embeddings",
        ),
        ("config.json", {"model_type": "distilbert"}, UnsupportedModelError, "'distilbert'"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True},
            UnsupportedModelError,
            "pools by pooling_mode_max_tokens",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True},
            UnsupportedModelError,
            "pools by .*,",
        ),
    ],
)
def test_models_that_are_refused(tmp_path, file, fields, error, match):
    folder = save_bert(make_bert(), tmp_path / "model", "mean")
    edited(folder / file, **fields)
    with pytest.raises(error, match=match) as raised:
        LLM(folder)
    assert raised.value.fix and "\n" not in str(raised.value)


def test_an_unknown_pooling_of_a_file(tmp_path, folder):
    path = write_bert_gguf(folder, tmp_path / "rank.gguf", pooling=4)
    with pytest.raises(UnsupportedModelError, match="pooling_type 4"):
        LLM(path)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_async_engine_gives_the_same_vectors(encoder, folder, llm, kind):
    expected = [output.outputs for output in encoder.embed(TEXTS)]

    async def main():
        engine = (
            AsyncEngine.from_model(folder) if kind == "thread" else AsyncEngine.in_process(folder)
        )
        try:
            while not engine.is_running:
                await asyncio.sleep(0.01)
            found = await asyncio.gather(*map(engine.embed, TEXTS))
            assert [output.outputs for output in found] == expected
            assert engine.facts.embedding_size == 48 and engine.num_unfinished == 0
            with pytest.raises(ContextLengthError, match="65 tokens"):
                await engine.embed([1] * 65)
            with pytest.raises(InvalidRequestError, match="loaded to embed"):
                await engine.submit("hello")
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(main(), 120))


class Counting:
    """A model that notes the texts of each pass; the text [13] fails."""

    pass_tokens = 4

    def __init__(self):
        self.passes = []

    def check(self, text):
        pass

    def embed(self, texts, starts):
        self.passes.append([tuple(text) for text in texts])
        if [13] in texts:
            raise ValueError("unlucky")
        return [np.array(text, np.float32) for text in texts]


def run(model, *messages):
    sent = []
    loop = EmbeddingLoop(model, sent.append)
    for message in messages:
        loop._take(message)
    while loop._lines:
        loop._pass()
    return sent


def test_tenants_take_turns_in_a_pass_and_by_weight():
    """One text of a tenant does not wait for a thousand of another."""
    model = Counting()
    flood = [Embed(number, [[1]] * 64, "a") for number in range(16)]
    sent = run(model, *flood, Embed(99, [[2]], "b"), Embed(100, [[3]] * 8, "c", weight=2.0))
    assert sent[0] == Embedded(99, [np.float32(2).tobytes()])
    assert [one.number for one in sent[1:]] == [100, *range(16)]
    assert (2,) in model.passes[0] and max(map(len, model.passes)) == 4
    shared = [text for texts in model.passes[:4] for text in texts]
    assert shared.count((3,)) == 8


def test_a_text_that_fails_costs_its_own_message_only():
    sent = run(Counting(), Embed(1, [[5]], "a"), Embed(2, [[13], [6]], "b"), Embed(3, [[7]], "c"))
    kinds = {(type(one).__name__, getattr(one, "number", None)) for one in sent}
    assert kinds == {("Embedded", 1), ("Embedded", 3), ("Refused", None)}


def test_a_loop_that_can_embed_no_more_ends_so_that_another_is_started():
    class Dead:
        pass_tokens = 16

        def check(self, text):
            pass

        def embed(self, texts, starts):
            raise EngineDeadError("Rank 1 of 2 was killed by signal 9.", "Load the model again.")

    sent = []
    loop = EmbeddingLoop(Dead(), sent.append)
    loop.put(Embed(1, [[5]]))
    with pytest.raises(EngineDeadError, match="Rank 1 of 2"):
        loop.run()
    assert not sent
