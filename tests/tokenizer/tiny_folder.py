"""Hugging Face folders with small tokenizers, trained on demand and opened without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.checkpoint import Checkpoint, TensorInfo

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:34:56 o'clock, isn't it?",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "Über die Brücke läuft ein Mädchen, 世界你好 and こんにちは 😀.",
    "hello world, hello there, hello again and again and again",
] * 3
TEXTS = [
    *CORPUS[:4],
    *(
        "",
        " ",
        "  ",
        "\n",
        " leading and trailing \n",
        "hello   world  ",
        "\t\tx = 1\r\n",
        "ΑΒΓ unseen 🎉 é e\u0301",
    ),
    *(
        "<s>hello</s>",
        "a<|user|> hello",
        "hello <|user|>\n\n world<mask> x",
        "hel<tool>lo <tool> x",
        "▁hello ▁",
    ),
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


def trained(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer: "bytes", "spm" (Llama 2's BPE), "metaspace" (a newer one), "unigram", "bert"."""
    if kind == "bert":
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
        )
        ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
        tokenizer.decoder = decoders.WordPiece()
        # all-MiniLM's file has both, which do not belong to encoding a text.
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=8)
        return tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    options: dict[str, Any] = {
        "vocab_size": 420 + len(bytes_),
        "special_tokens": SPECIAL,
        "show_progress": False,
    }
    if kind == "unigram":
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>"
        )
    else:
        fallback = kind != "bytes"
        tokenizer = tokenizers.Tokenizer(
            models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
        )
        more = bytes_ if fallback else []
        trainer = trainers.BpeTrainer(
            **{**options, "special_tokens": [*SPECIAL, *more]}, initial_alphabet=alphabet
        )
    if kind == "bytes":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "spm":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first", split=kind == "unigram"
        )
        steps = [decoders.Metaspace(prepend_scheme="first")]
        fused = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(steps if kind == "unigram" else fused)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind in ("spm", "metaspace"):  # the library marks what a trainer was told to keep as special
        tokenizer = _without_added(tokenizer, set(bytes_))
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.add_special_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("<|user|>", rstrip=True)]
    )
    ids = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    return tokenizer


def save_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **said: Any) -> Path:
    """Writes a folder as transformers does; `said` are further entries of tokenizer_config.json."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **said).save_pretrained(str(folder))
    return folder


def checkpoint_of(folder: Path, rows: int | None = None, **config: Any) -> Checkpoint:
    """A folder's checkpoint with nothing but an embedding of so many rows."""
    tensors = (
        {}
        if rows is None
        else {"token_embd.weight": TensorInfo("token_embd.weight", (rows, 4), "F32", 0, 0)}
    )
    return Checkpoint(
        folder, "llama", {}, tensors, (), "0", config={"model_type": "llama", **config}
    )


def tokenizer_of(folder: Path, rows: int | None = None, **config: Any) -> Tokenizer:
    return Tokenizer.from_checkpoint(checkpoint_of(folder, rows, **config))


def _without_added(tokenizer: tokenizers.Tokenizer, names: set[str]) -> tokenizers.Tokenizer:
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in names
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(content))
