"""Counts of `models/size.py`, by hand and against the sizes of transformers' own modules."""

from __future__ import annotations

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.blueprint import Experts, Mamba2
from twinphase.errors import CheckpointError, TwinphaseError, UnsupportedModelError
from twinphase.models.architectures import describe, gguf_architecture
from twinphase.models.config import Config
from twinphase.models.loader import open_model, read_blueprint
from twinphase.models.size import count_parameters, stored_bytes
from twinphase.phases.work import model_shape

FIELDS = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
DENSE_HYBRID = {"num_local_experts": 0, "layer_types": ["attention"] * 3, "mamba_n_heads": 8}
SPACES = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "position_embedding_type": "nope",
}
MOE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


def blueprint_of(model_type: str, **fields: object):
    config = FIELDS | {"model_type": model_type} | fields
    return describe(Config(config, gguf_architecture(model_type, "m"), "m"))


def test_a_dense_model_by_hand():
    attention = 64 * (64 + 2 * 32) + 64 * 64
    ffn = 3 * 64 * 128
    size = count_parameters(blueprint_of("llama"))
    assert size.layers == 3 * (attention + ffn) and size.experts == 0
    assert size.tail == 64 * 64 + ffn  # the last layer's output projection and feed-forward
    assert size.head == size.embedding == 320 * 64
    assert size.other == (2 * 3 + 1) * 64
    assert size.total == size.active(None) == size.layers + 2 * 320 * 64 + size.other
    tied = count_parameters(blueprint_of("llama", tie_word_embeddings=True))
    assert (tied.head, tied.embedding) == (320 * 64, 0)


def test_experts_by_hand():
    blueprint = blueprint_of("qwen3_moe", **MOE)
    size = count_parameters(blueprint)
    attention = 64 * (64 + 64) + 64 * 64
    router = 64 * 8
    expert = 3 * 64 * 32
    assert size.layers == 3 * (attention + router)  # a router is every row's
    assert (size.experts, size.tail_experts) == (3 * 8 * expert, 8 * expert)
    assert size.linear(blueprint.experts) == size.layers + 3 * 2 * expert
    assert size.active(blueprint.experts) == size.total - 3 * 6 * expert
    assert size.linear(Experts(8, 8, 32, True)) == size.layers + size.experts


@pytest.mark.parametrize(
    ("layers", "experts", "total", "active"),
    [(24, 32, 20.91e9, 3.61e9), (36, 128, 116.83e9, 5.13e9)],
)
def test_gpt_oss_as_its_model_card_counts(layers, experts, total, active):
    """Table 1 of arXiv:2508.10925; its active parameters exclude the embedding, not the head."""
    blueprint = blueprint_of(
        "gpt_oss",
        hidden_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_local_experts=experts,
        num_experts_per_tok=4,
        vocab_size=201_088,
    )
    size = count_parameters(blueprint)
    assert size.total == pytest.approx(total, abs=0.005e9)
    assert size.active(blueprint.experts) - size.embedding == pytest.approx(active, abs=0.005e9)


MODEL_TYPES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "ministral3",
    "olmoe",
    "granite",
    "granitemoehybrid",
    "granitemoehybrid-mixture",
    "falcon_h1",
    "nemotron_h",
    "smollm3",
    "exaone4",
    "glm4",
    "gpt_oss",
    "lfm2_moe",
    "qwen3_5_moe_text",
]
HYBRID_MOE = MOE | {
    "num_dense_layers": 1,
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_as_many_parameters_as_transformers_has(model_type):
    import torch
    import transformers

    extra = MOE if model_type in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss") else {}
    if model_type == "granitemoehybrid":
        extra = DENSE_HYBRID
    if model_type == "granitemoehybrid-mixture":
        model_type = "granitemoehybrid"
        extra = SPACES | {"num_local_experts": 8, "num_experts_per_tok": 2}
    if model_type == "nemotron_h":
        extra = {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}
    if model_type in ("lfm2_moe", "qwen3_5_moe_text"):
        kind = "conv" if model_type == "lfm2_moe" else "linear_attention"
        extra = HYBRID_MOE | {"layer_types": [kind, kind, "full_attention"]}
    config = transformers.AutoConfig.for_model(model_type, **FIELDS, **extra, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = count_parameters(blueprint_of(**config.to_dict()))
    biases = [b for name, b in model.named_buffers() if name.endswith("expert_bias")]
    # parameters() has tied ones once
    assert found.total == sum(p.numel() for p in [*model.parameters(), *biases])


def test_bytes_and_the_cost_formulas_numbers_of_a_file(tmp_path):
    checkpoint = open_model(
        write_tiny_gguf(tmp_path / "tiny.gguf", tied=False, tensor_type="F16", layers=3)
    )
    blueprint = read_blueprint(checkpoint)
    size = count_parameters(blueprint)
    nbytes = stored_bytes(checkpoint, blueprint)
    for use in ("layers", "head", "embedding", "tail"):
        assert getattr(nbytes, use) == 2 * getattr(size, use), use
    assert nbytes.other == 4 * size.other and nbytes.total == sum(
        t.nbytes for t in checkpoint.tensors.values()
    )
    shape = model_shape(checkpoint, blueprint)
    assert shape.linear_parameters == size.layers - size.tail
    assert shape.head_parameters == size.head + size.tail
    assert (shape.linear_bytes, shape.head_bytes) == (
        2 * shape.linear_parameters,
        2 * shape.head_parameters,
    )
    assert (shape.window, shape.windowed_layers, shape.num_experts) == (None, 0, 0)


def test_windows_reach_the_cost_formulas():
    from twinphase.models.size import Size
    from twinphase.phases.work import make_shape

    blueprint = blueprint_of("gemma2", sliding_window=8)
    shape = make_shape(blueprint, count_parameters(blueprint), Size())
    assert blueprint.windows == (8, None, 8)
    assert (shape.window, shape.windowed_layers, shape.num_layers) == (8, 2, 3)


def test_granite_4_with_and_without_rotation_and_state_spaces():
    hybrid = {"num_local_experts": 0, "layer_types": ["attention"] * 3}
    assert blueprint_of("granitemoehybrid", **hybrid).ropes == (None,) * 3
    rotated = blueprint_of("granitemoehybrid", **hybrid, position_embedding_type="rope")
    assert None not in rotated.ropes and rotated.recurrence is None
    spaces = blueprint_of("granitemoehybrid", **SPACES, num_local_experts=8, num_experts_per_tok=2)
    assert spaces.recurrent_layers == (0, 2) and spaces.ropes == (None,) * 3
    assert spaces.recurrence == Mamba2(
        taps=4, key_heads=1, value_heads=8, key_dim=16, value_dim=16, log_decay=True
    )
    for fields, named in (
        ({"layer_types": ["attention", "lstm", "attention"]}, "lstm"),
        (SPACES | {"mamba_proj_bias": True}, "mamba_proj_bias"),
        (SPACES | {"time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        (SPACES | {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            blueprint_of("granitemoehybrid", **hybrid | fields)
    with pytest.raises(CheckpointError, match="3 heads"):
        blueprint_of("granitemoehybrid", **hybrid | SPACES | {"mamba_n_heads": 3})
    fields = FIELDS | {"rope_scaling": {"finetuned": False}}
    assert describe(Config(fields, "granite", "m", is_gguf=True)).ropes == (None,) * 3


def test_layers_of_nemotron_h_are_halves_named_by_letters():
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "hidden_size": 64}
    blueprint = blueprint_of("nemotron_h", **sizes, hybrid_override_pattern="M-*")
    layers = blueprint.recurrent_layers, blueprint.ffn_layers, blueprint.attention_layers
    assert layers == ((0,), (1,), (2,)) and blueprint.last_writer == 2
    for pattern, named in (("M*E", "experts"), ("M-*-", "'M-\\*-'"), ("M--", "M--")):
        with pytest.raises(TwinphaseError, match=named):
            blueprint_of("nemotron_h", **sizes, hybrid_override_pattern=pattern)
    with pytest.raises(UnsupportedModelError, match="relu2"):
        blueprint_of("nemotron_h", **sizes, hybrid_override_pattern="M-*", mlp_hidden_act="silu")


def test_experts_that_are_not_as_the_family_has_them_are_refused():
    softmax = Config(FIELDS | MOE | {"expert_gating_func": 2}, "qwen3moe", "m", is_gguf=True)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func"):
        describe(softmax)
    hybrid = {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 3}
    with pytest.raises(CheckpointError, match="num_dense_layers"):
        blueprint_of("lfm2_moe", **MOE, **hybrid)


@pytest.mark.parametrize(
    ("name", "named"), [("gemma3n_text", "AltUp"), ("mistral4", "MLA"), ("nothing", "supported.")]
)
def test_what_is_not_computed_is_refused_by_name(name, named):
    for refused in (
        lambda: gguf_architecture(name, "m"),
        lambda: describe(Config(FIELDS, name, "m", is_gguf=True)),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            refused()
        assert name in caught.value.cause and named in caught.value.cause
