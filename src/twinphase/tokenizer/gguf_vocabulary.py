"""Builds a `tokenizers` tokenizer from the vocabulary of a GGUF file.

Five families: byte-level BPE ("gpt2"), SentencePiece BPE with byte fallback ("llama"), the same
with merges ("gemma4"), Unigram ("t5"), WordPiece ("bert"). This is done once per file, and the
result is cached (tokenizer.py). The rules are those of llama.cpp, which defined the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.tokenizer.facts import SPACE, Spelling, TokenizerFacts
from twinphase.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from twinphase.tokenizer.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    Pieces,
    add_tokens,
    bpe_model,
    make_normalizer,
)

_SPELLINGS = {
    "gpt2": Spelling.BYTE_LEVEL,
    "llama": Spelling.SENTENCEPIECE,
    "gemma4": Spelling.SENTENCEPIECE,
    "t5": Spelling.SENTENCEPIECE,
    "bert": Spelling.WORDPIECE,
}
_FIX = "The file is damaged or was converted wrongly: fetch it again."
# Tokens that end a turn in some chat format (llama.cpp's list); a model may have several.
_END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
)
# Gemma 4 waits for the result of a call at this token.
_GEMMA4_WAITS = "<|tool_response>"
# In GPT-OSS's format "<|end|>" ends a message, and more messages may follow.
_HARMONY = ("<|return|>", "<|call|>", "<|end|>")
# Phi-3 keeps a space after these special tokens; it drops spaces and newlines after all others.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# A longer word is unknown, as in BERT's own tokenizer.
_MAX_WORD_CHARACTERS = 100


def build_tokenizer(
    metadata: Mapping[str, Any], vocabulary: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Build the tokenizer from the file's metadata and its `tokenizer.ggml.*` arrays.

    Raises:
        UnsupportedModelError: the kind of tokenizer or the pre-tokenizer is unknown.
        CheckpointError: arrays are missing or contradict each other.
    """
    spelling = _spelling(metadata)
    # llama.cpp names empty entries like this too; no text produces these rows of the embedding.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_strings(vocabulary, "tokens"))]
    types = _numbers(vocabulary, "token_type", len(tokens), default=NORMAL)
    if _is_gemma4(metadata):
        # Some strings occur twice; the last one is their token, as in llama.cpp.
        last = {token: i for i, token in enumerate(tokens)}
        tokens = [t if last[t] == i else f"[TWICE_{i}]" for i, t in enumerate(tokens)]
    if spelling is Spelling.WORDPIECE:
        tokens = [_as_bert_writes(token, kind) for token, kind in zip(tokens, types, strict=True)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError("The vocabulary has the same token twice.", _FIX)
    try:
        if spelling is Spelling.BYTE_LEVEL:
            tokenizer = _byte_level_bpe(
                ids, _strings(vocabulary, "merges"), _pre_tokenizer(metadata)
            )
        elif _is_gemma4(metadata):
            tokenizer = _gemma4_bpe(ids, tokens, _strings(vocabulary, "merges"), metadata)
        elif spelling is Spelling.SENTENCEPIECE:
            scores = _numbers(vocabulary, "scores", len(tokens))
            if metadata.get("tokenizer.ggml.model") == "t5":
                charsmap = vocabulary.get("tokenizer.ggml.precompiled_charsmap", ())
                tokenizer = _unigram(list(zip(tokens, scores, strict=True)), metadata, charsmap)
            else:
                tokenizer = _sentencepiece_bpe(ids, types, scores, metadata)
        else:
            tokenizer = _wordpiece(ids, tokens, metadata)
    except (UnsupportedModelError, CheckpointError):
        raise
    except Exception as error:
        # The library raises bare Exception, such as for a merge of unknown tokens.
        raise CheckpointError(
            f"The vocabulary is inconsistent: {str(error).splitlines()[0]}.", _FIX
        ) from None
    phi3 = any(name in str(metadata.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    swallows = phi3 and spelling is Spelling.SENTENCEPIECE
    add_tokens(
        tokenizer,
        tokens,
        types,
        swallowing=set(tokens).difference(_PHI3_KEEPS_SPACE) if swallows else set(),
    )
    return tokenizer


def gguf_facts(metadata: Mapping[str, Any], backend: tokenizers.Tokenizer) -> TokenizerFacts:
    """A file's special tokens; `backend` is the result of `build_tokenizer`.

    Raises:
        UnsupportedModelError: the kind of tokenizer or the pre-tokenizer is unknown.
        CheckpointError: a special id is outside the vocabulary.
    """
    spelling = _spelling(metadata)
    defaults = {"bos": 1, "eos": 2} if spelling is Spelling.SENTENCEPIECE else {}
    size = backend.get_vocab_size()
    ids = {
        kind: _special_id(metadata, kind, defaults.get(kind), size)
        for kind in ("bos", "eos", "eot", "eom")
    }
    # The format misspells "seperator"; some files use -1 for a missing token.
    for kind in ("unknown", "padding", "cls", "seperator"):
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        ids[kind] = token_id if isinstance(token_id, int) and 0 <= token_id < size else None
    bos = ids["bos"]
    eos = ids["eos"]
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    # Only control tokens count: "<EOT>" may be ordinary text in another model.
    ends = [token for token in _END_TOKENS if token in special]
    if set(_HARMONY) <= set(ends):
        ends.remove("<|end|>")
    if _is_gemma4(metadata):
        ends.append(_GEMMA4_WAITS)
    end_ids = [*(ids[kind] for kind in ("eos", "eot", "eom")), *map(backend.token_to_id, ends)]
    named = {"bos": bos, "eos": eos, "unk": ids["unknown"], "pad": ids["padding"]}
    if spelling is Spelling.WORDPIECE:
        begin = bos if bos is not None else ids["cls"]
        prefix = begin if begin is not None else backend.token_to_id("[CLS]")
        suffix = ids["seperator"] if ids["seperator"] is not None else backend.token_to_id("[SEP]")
        between = [suffix]
    else:
        unigram = metadata.get("tokenizer.ggml.model") == "t5"
        adds_bos = spelling is Spelling.SENTENCEPIECE or _pre_tokenizer(metadata).add_bos
        prefix = bos if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
        suffix = eos if metadata.get("tokenizer.ggml.add_eos_token", unigram) else None
        separator = ids["seperator"] if ids["seperator"] is not None else eos
        between = [eos, separator]
    space_prefix = spelling is Spelling.SENTENCEPIECE and metadata.get(
        "tokenizer.ggml.add_space_prefix", not _is_gemma4(metadata)
    )
    return TokenizerFacts(
        vocab_size=size,
        spelling=spelling,
        names={
            f"{name}_token": backend.id_to_token(i) or ""
            for name, i in named.items()
            if i is not None
        },
        bos_token_id=bos,
        eos_token_id=eos,
        end_token_ids=frozenset(i for i in end_ids if i is not None),
        prefix=() if prefix is None else (prefix,),
        suffix=() if suffix is None else (suffix,),
        middle=tuple(i for i in between if i is not None),
        strips_leading_space=bool(space_prefix) or spelling is Spelling.WORDPIECE,
    )


def _is_gemma4(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.model") == "gemma4"


def _spelling(metadata: Mapping[str, Any]) -> Spelling:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _SPELLINGS:
        raise UnsupportedModelError(
            f"Tokenizer model {kind!r} is not supported.", f"Supported: {', '.join(_SPELLINGS)}."
        )
    return _SPELLINGS[kind]


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The pre-tokenizer of a byte-level BPE file; by default "default", as in llama.cpp."""
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"Pre-tokenizer {name!r} is not supported.", f"Supported: {', '.join(PRE_TOKENIZERS)}."
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(
    ids: dict[str, int], merges: Sequence[str], pre: PreTokenizer
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=_pairs(merges), ignore_merges=pre.ignore_merges)
    )
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        # The left part may itself begin with a space.
        middle = merge.find(" ", 1)
        if middle < 0:
            raise CheckpointError(f"The merge {merge[:40]!r} does not name two tokens.", _FIX)
        pairs.append((merge[:middle], merge[middle + 1 :]))
    return pairs


def _gemma4_bpe(
    ids: dict[str, int], tokens: Sequence[str], merges: Sequence[str], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """BPE over characters, with bytes for characters without a token; newlines are split off."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 3)
    model = models.BPE(
        vocab=ids,
        merges=_pairs(merges),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    return tokenizer


def _sentencepiece_bpe(
    ids: dict[str, int], types: Sequence[int], scores: Sequence[float], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = tokenizers.Tokenizer(bpe_model(ids, types, scores, unknown))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _unigram(
    pieces: list[tuple[str, float]], metadata: Mapping[str, Any], charsmap: Sequence[int]
) -> tokenizers.Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 3)
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown))
    tokenizer.normalizer = make_normalizer(
        Pieces(
            charsmap=bytes(charsmap),
            space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            one_space=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)),
        )
    )
    return tokenizer


def _wordpiece(
    ids: dict[str, int], tokens: Sequence[str], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", ids.get("[UNK]"))
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise CheckpointError("The vocabulary has no token for unknown words.", _FIX)
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocab=ids, unk_token=tokens[unknown], max_input_chars_per_word=_MAX_WORD_CHARACTERS
        )
    )
    lowercase = bool(metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    strip_accents = bool(metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _as_bert_writes(token: str, kind: int) -> str:
    """Undo llama.cpp's conversion: U+2581 marks the start of a word, ## its continuation."""
    if token.startswith(SPACE):
        return token[1:]
    return token if kind in (CONTROL, UNKNOWN) else f"##{token}"


def _special_id(
    metadata: Mapping[str, Any], name: str, default: int | None, vocab_size: int
) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
        raise CheckpointError(
            f"{name}_token_id {token_id} is outside the vocabulary of {vocab_size}.",
            "Convert the model again.",
        )
    return token_id


def _strings(vocabulary: Mapping[str, Any], name: str) -> list[str]:
    values = vocabulary.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values:
        raise CheckpointError(f"The file has no list tokenizer.ggml.{name}.", _FIX)
    return values


def _numbers(
    vocabulary: Mapping[str, Any], name: str, count: int, default: int | None = None
) -> list[Any]:
    values = vocabulary.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return [default] * count
    if values is None or isinstance(values, list) or len(values) != count:
        raise CheckpointError(
            f"tokenizer.ggml.{name} does not have a number for each of {count} tokens.", _FIX
        )
    numbers: list[Any] = values.tolist()
    return numbers
