"""Tiny random BERT models with a tokenizer, as a Hugging Face folder and as GGUF."""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tests.tokenizer.tiny_folder import CORPUS, save_folder, trained
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from twinphase.models.loader import open_model

FLAGS = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}


SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}


def make_bert(**config: Any) -> Any:
    """A BertModel whose norms and biases are random too, so that nothing is neutral."""
    torch.manual_seed(0)
    return _random(
        transformers.BertModel(transformers.BertConfig(**(SIZES | config)), add_pooling_layer=False)
    )


def make_reranker(num_labels: int = 1, **config: Any) -> Any:
    """A cross-encoder: BERT with a pooler and a head."""
    torch.manual_seed(0)
    settings = transformers.BertConfig(**(SIZES | config), num_labels=num_labels)
    return _random(transformers.BertForSequenceClassification(settings))


def _random(model: Any) -> Any:
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def make_roberta(name: str) -> Any:
    """A model of that class, whose positions begin after the padding token's, such as bge-m3's."""
    torch.manual_seed(0)
    settings = SIZES | {"vocab_size": 300, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    sizes = settings | {"max_position_embeddings": 258, "pad_token_id": 1}
    cls = getattr(transformers, name)
    return _random(cls(cls.config_class(**sizes, num_labels=1)))


@cache
def roberta_vocabulary() -> tuple[list[tuple[str, float]], bytes]:
    """SentencePiece's pieces and scores in the order of XLM-RoBERTa, and its character map."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type="unigram",
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    found = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    first = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces = [(piece.piece, piece.score) for piece in found.pieces[3:]]
    return [*first, *pieces, ("<mask>", 0.0)], found.normalizer_spec.precompiled_charsmap


def roberta_tokenizer() -> tokenizers.Tokenizer:
    """As transformers makes XLM-RoBERTa's of a SentencePiece model."""
    pieces, charsmap = roberta_vocabulary()
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return tokenizer


def save_bert(model: Any, folder: Path, pooling: str | None = None) -> Path:
    """A folder as sentence-transformers lays it out; without `pooling`, as transformers does."""
    plain = model.config.model_type == "bert"
    save_folder(folder, trained("bert") if plain else roberta_tokenizer())
    model.save_pretrained(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        flags = {flag: name == pooling for name, flag in FLAGS.items()}
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 48, **flags})
        )
    return folder


def write_bert_gguf(
    folder: Path, path: Path, pooling: int = 1, without: Collection[str] = ()
) -> Path:
    """The same weights as convert_hf_to_gguf.py writes them: linear layers F16, the rest F32."""
    checkpoint = open_model(folder)
    config = checkpoint.config
    assert config is not None
    writer = gguf.GGUFWriter(str(path), "bert")
    offset = 0 if config["model_type"] == "bert" else 2
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if offset:
        _add_roberta_vocabulary(writer)
    else:
        _add_vocabulary(writer, folder)
    for name, info in checkpoint.tensors.items():
        if name in without:
            continue
        values = checkpoint.raw(name).view(np.float32).reshape(info.shape)
        if name == "position_embd.weight":
            values = values[offset:]
        dtype = np.float16 if name.startswith("blk.") and len(info.shape) == 2 else np.float32
        writer.add_tensor(name, np.ascontiguousarray(values.astype(dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    """As `BertModel.set_vocab` writes it: control tokens unchanged, word starts with U+2581."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    control = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    names = sorted(vocab, key=vocab.__getitem__)
    words = [
        name if name in control else name[2:] if name.startswith("##") else "\u2581" + name
        for name in names
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # what the converter calls BERT's
    writer.add_token_list(words)
    writer.add_token_types([3 if name in control else 1 for name in names])
    for name, key in {
        "UNK": "unknown",
        "CLS": "cls",
        "SEP": "seperator",
    }.items():  # spelled so by GGUF
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", vocab[f"[{name}]"])
    writer.add_token_type_count(2)


def _add_roberta_vocabulary(writer: gguf.GGUFWriter) -> None:
    """As `_xlmroberta_set_vocab` writes it."""
    pieces, charsmap = roberta_vocabulary()
    control = {"<s>": 3, "<pad>": 3, "</s>": 3, "<unk>": 2, "<mask>": 3}
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types([control.get(piece, 1) for piece, _ in pieces])
    writer.add_add_space_prefix(True)
    writer.add_token_type_count(1)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap)
    for name, token_id in {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "cls": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def vector_of(model: Any, token_ids: list[int], pooling: str) -> np.ndarray:
    """What sentence-transformers makes of the last hidden state: pooled, then of length 1."""
    with torch.no_grad():
        hidden = model(torch.tensor([token_ids])).last_hidden_state[0].double()
    row = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return (row / row.norm()).numpy()
