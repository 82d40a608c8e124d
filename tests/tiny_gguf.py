"""Tiny GGUF files with random weights, for tests that need a real file but no real model.

The files are complete: the Llama family's hyper-parameters and tensor names, a byte-level BPE
tokenizer and a ChatML template. A hidden size of 64 gives a file of some hundred kilobytes, written
in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Merges build each of these words, so that texts get tokens of several characters.
_WORDS = ("the", "hello", " the", " world", " and", "ing", "tion", " of", " to", " in")
# Matrices whose results are added to the hidden state.
_ADDED = ("attn_output", "ssm_out", "ffn_down")
# Types that the gguf package cannot quantize to: values in a block, its bytes, where its float16
# scale and minimum are, and what random integers multiply the scale by, so that weights of
# 1/sqrt(K) come out.
_RANDOM_BLOCKS: dict[str, tuple[int, int, tuple[int, ...], float]] = {
    "Q4_K": (256, 144, (0, 2), 31 * 7),
    "Q5_K": (256, 176, (0, 2), 31 * 15),
    "Q6_K": (256, 210, (208,), 64 * 18),
    "Q2_K": (256, 84, (80, 82), 8 * 1.5),
    "Q3_K": (256, 110, (108,), 16 * 2),
    "IQ4_NL": (32, 18, (0,), 70),
    "IQ4_XS": (256, 136, (0,), 16 * 70),
}


def write_tiny_gguf(
    path: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vocab: int = 320,
    context: int = 512,
    tensor_type: str = "Q4_0",
    embedding_type: str | None = None,
    types: Mapping[str, str] | None = None,
    tied: bool = True,
    seed: int = 0,
    architecture: str = "llama",
    rope_theta: float = 10000.0,
    rms_norm_eps: float = 1e-5,
    pre: str = "smollm",
    chat_template: str = CHAT_TEMPLATE,
    window: int | None = None,
    experts: tuple[int, int] | None = None,
    infill: tuple[int, int, int] | None = None,
    convolutions: Collection[int] = (),
    deltas: Collection[int] = (),
    spaces: Collection[int] = (),
    parallel: bool = False,
    feed_forward_alone: Collection[int] = (),
    next_token: bool = False,
    passes_on: bool = False,
    shared_kv: int = 0,
) -> Path:
    """Writes a small random Llama-family model and returns its path.

    Args:
        path: file to write.
        hidden: model width; K-quants and IQ4_XS need a multiple of 256 here and in `ffn`, other
            formats of 32.
        layers: number of blocks.
        heads: query heads; the head size is `hidden // heads`.
        kv_heads: key and value heads.
        ffn: width of the feed-forward layer.
        vocab: number of tokens, at least 259 (bytes and three control tokens).
        context: trained context length.
        tensor_type: type of every matrix, a key of `twinphase.weights.quant.FORMATS`.
        embedding_type: type of token_embd and output, `tensor_type` if None.
        types: type of single matrices, such as {"attn_v": "Q6_K"}, where it differs.
        tied: whether the output matrix is the embedding (no output.weight).
        seed: of the weights.
        architecture: GGUF architecture, also the prefix of the hyper-parameter keys.
        rope_theta: base of the rotary embedding.
        rms_norm_eps: epsilon of the norms.
        pre: name of the pre-tokenizer.
        chat_template: Jinja source.
        window: tokens that each layer attends to.
        experts: how many a layer has, and how many of them a token goes through.
        infill: ids of the tokens before a prefix, a suffix and a middle.
        convolutions: layers that are LFM2's short convolutions; the architecture is then lfm2.
        deltas: layers that are Qwen3.5's delta rules, with 2 key heads of 16 and 4 value heads of
            32; the architecture is then qwen35, or with experts qwen35moe, whose every token goes
            through one more expert. A head must be a multiple of 32 wide.
        spaces: layers that are Mamba-2, with a group of 16 and 4 heads of 32; the architecture is
            then granitehybrid, with experts also one that every token goes through.
        parallel: whether all layers are Mamba-2 and attention, too; the architecture is then
            falcon-h1.
        feed_forward_alone: layers that are nothing else; the architecture is then nemotron_h, where
            no layer has both halves.
        next_token: whether a model with delta rules has a layer for a further token.
        passes_on: whether all layers add nothing, and that one passes the embedding on: it is
            always right where the likeliest token is taken.
        shared_kv: how many of the last layers read KV of others; the architecture is then gemma4,
            every other layer has the window, and the others' heads are twice as wide.
    """
    qwen35 = "qwen35moe" if experts else "qwen35"
    architecture = "lfm2" if convolutions else qwen35 if deltas else architecture
    architecture = "gemma4" if shared_kv else "granitehybrid" if spaces else architecture
    recurrent = {*convolutions, *deltas, *spaces}
    if parallel:
        architecture = "falcon-h1"
        spaces = range(layers)
    if feed_forward_alone:
        architecture = "nemotron_h"
        recurrent |= {*feed_forward_alone}  # they have no KV
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers + next_token)
    writer.add_feed_forward_length(
        [ffn if layer in feed_forward_alone else 0 for layer in range(layers)]
        if feed_forward_alone
        else ffn
    )
    writer.add_head_count(heads)
    writer.add_head_count_kv(
        [0 if layer in recurrent else kv_heads for layer in range(layers + next_token)]
        if recurrent
        else kv_heads
    )
    if next_token:
        writer.add_nextn_predict_layers(1)
    if convolutions:
        writer.add_shortconv_l_cache(3)
    if deltas or spaces:
        writer.add_key_length(hidden // heads)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(16)
        writer.add_ssm_group_count(2 if deltas else 1)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_inner_size(128)
    writer.add_layer_norm_rms_eps(rms_norm_eps)
    writer.add_rope_freq_base(rope_theta)
    writer.add_rope_dimension_count(hidden // heads // (4 if deltas else 1))
    if shared_kv:
        writer.add_shared_kv_layers(shared_kv)
        writer.add_key_length(2 * hidden // heads)
        writer.add_key_length_swa(hidden // heads)
        writer.add_embedding_length_per_layer_input(32)
        writer.add_sliding_window_pattern([layer % 2 == 0 for layer in range(layers)])
    writer.add_vocab_size(vocab)
    writer.add_file_type(_file_type(tensor_type))
    if window:
        writer.add_sliding_window(window)
    if experts:
        writer.add_expert_count(experts[0])
        writer.add_expert_used_count(experts[1])
    if experts and (deltas or spaces):
        writer.add_expert_feed_forward_length(ffn)
        writer.add_expert_shared_feed_forward_length(ffn)
    _add_tokenizer(writer, vocab, pre, chat_template)
    for name, token_id in zip(("pre", "suf", "mid"), infill or (), strict=False):
        writer.add_uint32(f"tokenizer.ggml.fim_{name}_token_id", token_id)

    kv = hidden // heads * kv_heads
    attention: dict[str, tuple[int, ...]] = {
        "attn_q": (hidden * (2 if deltas else 1), hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
    }
    convolution: dict[str, tuple[int, ...]] = {
        "shortconv.in_proj": (3 * hidden, hidden),
        "shortconv.conv": (hidden, 3),
        "shortconv.out_proj": (hidden, hidden),
    }
    delta: dict[str, tuple[int, ...]] = {
        "attn_qkv": (192, hidden),
        "attn_gate": (128, hidden),
        "ssm_alpha": (4, hidden),
        "ssm_beta": (4, hidden),
        "ssm_conv1d": (192, 4),
        "ssm_out": (hidden, 128),
    }
    space: dict[str, tuple[int, ...]] = {
        "ssm_in": (128 + 160 + 4, hidden),
        "ssm_conv1d": (160, 4),
        "ssm_out": (hidden, 128),
    }
    matrices: dict[str, tuple[int, ...]] = {}
    feed_forward: dict[str, tuple[int, ...]] = {
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    types = {"shortconv.conv": "F32", "ssm_conv1d": "F32", **(types or {})}
    if experts:
        matrices |= {"ffn_gate_inp": (experts[0], hidden)}
        types.setdefault("ffn_gate_inp", "F32")  # as llama.cpp keeps it
        matrices |= {
            f"ffn_{name}_exps": (experts[0], *shape) for name, shape in feed_forward.items()
        }
        if deltas or spaces:
            matrices |= {f"ffn_{name}_shexp": shape for name, shape in feed_forward.items()}
        if deltas:
            matrices |= {"ffn_gate_inp_shexp": (1, hidden)}
            types.setdefault("ffn_gate_inp_shexp", "F32")
    else:
        matrices |= {f"ffn_{name}": shape for name, shape in feed_forward.items()}
    _add_matrix(writer, rng, "token_embd.weight", (vocab, hidden), embedding_type or tensor_type)
    for layer in range(layers + next_token):
        norms = ("attn_norm", "post_attention_norm" if deltas else "ffn_norm")
        for norm in norms[:1] if feed_forward_alone else norms:
            _add_norm(writer, rng, f"blk.{layer}.{norm}.weight", hidden)
        if layer in deltas:
            _add_norm(writer, rng, f"blk.{layer}.ssm_norm.weight", 32)
            _add_norm(writer, rng, f"blk.{layer}.ssm_dt.bias", 4)
            decays = -rng.uniform(0.01, 2.0, 4).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ssm_a", decays)
        if layer in spaces:
            _add_norm(writer, rng, f"blk.{layer}.ssm_conv1d.bias", 160)
            _add_norm(writer, rng, f"blk.{layer}.ssm_dt.bias", 4)
            if not parallel:
                writer.add_tensor(f"blk.{layer}.ssm_norm.weight", np.ones((1, 128), np.float32))
            for name, sign in (("a", -1), ("d", 1)):
                values = sign * rng.uniform(0.01, 2.0, (4, 1)).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.ssm_{name}", values)
        if recurrent and not spaces and layer not in recurrent:
            for norm in ("attn_q_norm", "attn_k_norm"):
                _add_norm(writer, rng, f"blk.{layer}.{norm}.weight", hidden // heads)
        mixer = convolution if layer in convolutions else delta if layer in deltas else attention
        mixer = attention | space if parallel else space if layer in spaces else mixer
        if shared_kv:
            norms, mixer = _gemma4_layer(mixer, layer, heads, layers - shared_kv)
            for norm, width in norms.items():
                _add_norm(writer, rng, f"blk.{layer}.{norm}.weight", width)
        both = mixer | matrices
        if feed_forward_alone:
            both = mixer
        if layer in feed_forward_alone:
            both = {name: matrices[name] for name in ("ffn_up", "ffn_down")}
        for name, shape in both.items():
            full = f"blk.{layer}.{name}.weight"
            if passes_on and name in _ADDED:
                writer.add_tensor(full, np.zeros(shape, np.float32))
            else:
                _add_matrix(writer, rng, full, shape, types.get(name, tensor_type))
    if next_token:
        _add_next_token(writer, rng, f"blk.{layers}.nextn", hidden, passes_on)
    if shared_kv:
        _add_norm(writer, rng, "per_layer_proj_norm.weight", 32)
        own = {"token_embd": (vocab, 32 * layers), "model_proj": (32 * layers, hidden)}
        for name, shape in own.items():
            _add_matrix(writer, rng, f"per_layer_{name}.weight", shape, tensor_type)
    last_norm = "token_embd_norm.weight" if convolutions else "output_norm.weight"
    _add_norm(writer, rng, last_norm, hidden)
    if not tied:
        _add_matrix(writer, rng, "output.weight", (vocab, hidden), embedding_type or tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_next_token(
    writer: gguf.GGUFWriter, rng: np.random.Generator, prefix: str, hidden: int, passes_on: bool
) -> None:
    join = rng.standard_normal((hidden, 2 * hidden), np.float32) / np.float32(hidden**0.5)
    if passes_on:
        join = np.eye(*join.shape, dtype=np.float32)
    writer.add_tensor(f"{prefix}.eh_proj.weight", join)
    for norm in ("enorm", "hnorm"):
        writer.add_tensor(f"{prefix}.{norm}.weight", np.ones(hidden, np.float32))


def _gemma4_layer(
    attention: Mapping[str, tuple[int, ...]], layer: int, heads: int, owners: int
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Widths of the norms and shapes of the matrices that a layer has beside a Llama's."""
    times = 1 + layer % 2
    queries, hidden = attention["attn_q"]
    dim = times * queries // heads
    kv = (times * attention["attn_k"][0], hidden)
    norms = dict.fromkeys(("post_attention_norm", "post_ffw_norm", "post_norm"), hidden)
    norms |= {"attn_q_norm": dim, "layer_output_scale": 1}
    matrices = {"attn_q": (times * queries, hidden), "attn_output": (hidden, times * queries)}
    matrices |= {"inp_gate": (32, hidden), "proj": (hidden, 32)}
    if layer < owners:
        norms["attn_k_norm"] = dim
        matrices |= {"attn_k": kv, "attn_v": kv}
    return norms, matrices


def _file_type(tensor_type: str) -> int:
    name = f"MOSTLY_{tensor_type}" + ("_S" if tensor_type in ("Q3_K", "Q4_K", "Q5_K") else "")
    name = {"MOSTLY_MXFP4": "MOSTLY_MXFP4_MOE"}.get(name, name)
    return int(gguf.LlamaFileType.ALL_F32 if tensor_type == "F32" else gguf.LlamaFileType[name])


def random_raw(
    rng: np.random.Generator, shape: tuple[int, int], tensor_type: str
) -> NDArray[np.uint8]:
    """Random weights of about 1/sqrt(K) in the given storage type, uint8 [N, bytes of a row]."""
    if tensor_type in _RANDOM_BLOCKS:
        return _random_blocks(rng, shape, tensor_type)
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[tensor_type])
    return np.ascontiguousarray(packed).view(np.uint8).reshape(shape[0], -1)


def tiny_vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: tokens, their GGUF types, and merges ("left right")."""
    alphabet = _byte_characters()
    tokens = [*CONTROL_TOKENS, *alphabet]
    merges: list[str] = []
    for word in _WORDS:
        characters = [alphabet[byte] for byte in word.encode()]
        for end in range(2, len(characters) + 1):
            left = "".join(characters[: end - 1])
            right = characters[end - 1]
            if left + right not in tokens and len(tokens) < size:
                tokens.append(left + right)
                merges.append(f"{left} {right}")
    if size < len(CONTROL_TOKENS) + len(alphabet):
        raise ValueError(
            f"vocab {size} is too small for {len(alphabet)} bytes and the control tokens"
        )
    filler = [f"<|unused_{i}|>" for i in range(size - len(tokens))]
    types = [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    types += [gguf.TokenType.UNUSED] * len(filler)
    return tokens + filler, [int(t) for t in types], merges


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte that GPT-2's byte-level BPE uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int, pre: str, chat_template: str) -> None:
    tokens, types, merges = tiny_vocabulary(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template)


def _add_norm(writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, size: int) -> None:
    writer.add_tensor(name, (1 + 0.1 * rng.standard_normal(size)).astype(np.float32))


def _add_matrix(
    writer: gguf.GGUFWriter,
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    tensor_type: str,
) -> None:
    raw = random_raw(rng, (math.prod(shape[:-1]), shape[-1]), tensor_type).reshape(*shape[:-1], -1)
    # GGUFWriter derives the shape in elements from F32 and F16 arrays, and from bytes for every
    # other type.
    native = {"F32": np.float32, "F16": np.float16}.get(tensor_type)
    if native is not None:
        writer.add_tensor(name, raw.view(native).reshape(shape))
    else:
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[tensor_type])


def _random_blocks(
    rng: np.random.Generator, shape: tuple[int, int], tensor_type: str
) -> NDArray[np.uint8]:
    """Random bytes are valid blocks once the float16 scales are sane."""
    rows, columns = shape
    size, nbytes, halves, spread = _RANDOM_BLOCKS[tensor_type]
    if columns % size:
        raise ValueError(f"{tensor_type} needs rows of a multiple of {size} values, got {columns}")
    blocks = rng.integers(0, 256, (rows, columns // size, nbytes), dtype=np.uint8)
    d = np.float32(columns**-0.5 / spread) * rng.uniform(0.5, 1.5, (rows, columns // size)).astype(
        np.float32
    )
    # The minimum is subtracted: half the largest value centres the weights on zero.
    half = d * np.float32({"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(tensor_type, 0))
    for start, value in zip(halves, (d, half), strict=False):
        blocks[..., start : start + 2] = value.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)
