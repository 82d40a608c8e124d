"""Renames a Hugging Face folder's tensors to GGUF's names, with the gguf package's own table.

Values are not changed: the model handles what llama.cpp's converter would change (rows of q and k
for rotation in pairs, 1 added to Gemma's norms). `experts.py` stacks experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.source import Source

# Prefixes of the text model within a larger model.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
    "bert.": "",
    "roberta.": "",
}
# The two halves of BERT's cross-encoder head, under RoBERTa's names. The first is the pooler, which
# a model without such a head does not use.
_HEAD = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
# Depthwise convolutions, whose second dimension is 1 in a folder and absent in GGUF.
_CONVOLUTIONS = ("shortconv.conv.weight", "ssm_conv1d.weight")
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|visual|audio_tower|multi_modal_projector"
    r"|embed_vision|embed_audio)\."
)
# Endings in GGUF, if not ".weight", of tensors without an ending in a folder.
_ENDINGS = {"ssm_a": "", "ssm_d": "", "exp_probs_b": ".bias"}
# Names that GGUF's table lacks.
_RENAMED = {".dt_bias": ".dt_proj.bias"}
# Granite 4's shared expert, which is the whole feed-forward layer of a dense model.
_DENSE_SHARED = {
    "shared_mlp.input_linear.": "mlp.gate_up_proj.",
    "shared_mlp.output_linear.": "mlp.down_proj.",
}
_SHARED_EXPERT = {"shared_mlp.input_linear.": "mlp.shared_expert.up_proj."}
# The MTP layer: GGUF's names of its own tensors; the others are named like those of the layer after
# the last.
_NEXT_TOKEN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}
_WITH_NEXT_TOKEN = ("qwen35", "qwen35moe")
# Tensors that are computed from the config or not used: rotary tables, BERT's position numbers, its
# pooler and training heads, and unsupported MTP layers.
_NOT_WEIGHTS = re.compile(
    r".*\brotary_emb\.\w+|.*\binv_freq|(.*\.)?position_ids|pooler\..*|cls\..*|mtp\..*"
)


def canonical_tensors(
    sources: Mapping[str, Source], architecture: str, layers: int, tied: bool
) -> dict[str, Source]:
    """The text model's tensors by GGUF's names; unknown tensors keep their own names.

    Args:
        sources: tensors by Hugging Face's names, with experts stacked.
        architecture: GGUF's name of the architecture.
        layers: number of blocks.
        tied: whether the output head is the embedding, so that a copy in the file is ignored.

    Raises:
        CheckpointError: two tensors have the same name.
        UnsupportedModelError: GGUF has no names for the architecture.
    """
    # The import takes a fifth of a second, and GGUF files do not need it.
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        raise UnsupportedModelError(
            f"Architecture {architecture!r} is not supported.", "Use another model."
        )
    table = get_tensor_name_map(arch, layers + 1)
    mixture = any(".experts." in name for name in sources)
    renamed = _RENAMED | (_SHARED_EXPERT if mixture else _DENSE_SHARED)

    def translated(name: str) -> str:
        for other, usual in renamed.items():
            name = name.replace(other, usual)
        for candidate in (name, f"model.{name}", name.removeprefix("model.")):
            if candidate in table.mapping:  # Attention sinks have no suffix.
                final = table.mapping[candidate][1]
                return final + _ENDINGS.get(final.rpartition(".")[2], ".weight")
            if known := table.get_name(candidate, try_suffixes=(".weight", ".bias")):
                return str(known)
        return name

    found: dict[str, Source] = {}
    for name, source in sources.items():
        plain = _without_prefix(name)
        if "classifier.weight" in sources:
            layer, dot, kind = plain.rpartition(".")
            plain = _HEAD.get(layer, layer) + dot + kind
        if architecture in _WITH_NEXT_TOKEN:
            plain = _next_token_name(plain, layers)
        if (
            _OTHER_MODALITIES.match(name)
            or _NOT_WEIGHTS.fullmatch(plain)
            or tied
            and plain == "lm_head.weight"
        ):
            continue
        final = translated(plain)
        if final in found:
            raise CheckpointError(
                f"Two tensors are named {final}; one of them is {name}.", "Fetch the model again."
            )
        if final.endswith(_CONVOLUTIONS) and len(source.shape) == 3 and source.shape[1] == 1:
            source = replace(source, shape=(source.shape[0], source.shape[2]))
        found[final] = source
    return found


def _next_token_name(name: str, layers: int) -> str:
    """The name of an MTP layer's tensor, as of layer number `layers`."""
    name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
    part, _, kind = name.rpartition(".")
    if part in _NEXT_TOKEN:
        return f"blk.{layers}.nextn.{_NEXT_TOKEN[part]}.{kind}"
    return name.replace("mtp.layers.0.", f"model.layers.{layers}.", 1)


def _without_prefix(name: str) -> str:
    for prefix, instead in _PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
