"""SentencePiece vocabularies (Kudo and Richardson, 2018) as `tokenizers` tokenizers.

A GGUF file has a copy of the pieces, scores and types (gguf_vocabulary.py); a folder may have only
the original, tokenizer.model. Text is split as by SentencePiece itself, with one exception: if a
model adds a space before a text, it is also added after control and user-defined pieces. This is
llama.cpp's rule, so that a folder and its GGUF file agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.tokenizer.facts import SPACE
from twinphase.weights.storage import read_limited

# Types of pieces; GGUF uses the same numbers.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
_UNIGRAM = 1
_BPE = 2
_MAX_FILE_BYTES = 256 << 20
_FETCH = "Fetch the model's folder again."
_FLOAT = Struct("<f")
# SentencePiece strips such spaces at both ends, and merges them elsewhere.
_SPACES = Regex(" {2,}")


@dataclass
class Pieces:
    """The used fields of a tokenizer.model, with the defaults of sentencepiece_model.proto."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    algorithm: int = _UNIGRAM
    space_after: bool = False  # Whether spaces belong to the end of a word.
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    space_prefix: bool = True
    one_space: bool = True  # Whether spaces are merged, and stripped at both ends.
    space_as_piece: bool = True  # Whether spaces are written as U+2581.
    changes_decoded: bool = False


def open_pieces(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a tokenizer.model, and special tokens by tokenizer_config.json's names.

    Raises:
        CheckpointError: the file is not a SentencePiece model, or its pieces contradict each other.
        UnsupportedModelError: the algorithm is neither BPE nor Unigram, or a setting would change
            the ids.
    """
    pieces = _read_pieces(path)
    unsupported = {
        "an algorithm other than BPE and Unigram": pieces.algorithm not in (_UNIGRAM, _BPE),
        "spaces at the end of words": pieces.space_after,
        "spaces that are not pieces": not pieces.space_as_piece,
        "rules for decoded text": pieces.changes_decoded,
        "user-defined pieces with spaces beside a space in front of the text": pieces.space_prefix
        and any(
            kind == USER_DEFINED and SPACE in t
            for t, kind in zip(pieces.tokens, pieces.types, strict=True)
        ),
        "unused pieces of a Unigram model": pieces.algorithm == _UNIGRAM and UNUSED in pieces.types,
    }
    for what, there in unsupported.items():
        if there:
            raise UnsupportedModelError(
                f"{path} has {what}, which is not supported.", "Use a tokenizer.json."
            )
    ids = {token: i for i, token in enumerate(pieces.tokens)}
    unknown = pieces.ids["unk"]
    if len(ids) != len(pieces.tokens) or not 0 <= unknown < len(ids):
        raise _damaged(path, "pieces that are there twice, or no unknown one")
    try:
        if pieces.algorithm == _BPE:
            model: Any = bpe_model(ids, pieces.types, pieces.scores, unknown)
        else:
            scored = list(zip(pieces.tokens, pieces.scores, strict=True))
            model = models.Unigram(scored, unk_id=unknown, byte_fallback=BYTE in pieces.types)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = make_normalizer(pieces)
        # The library would also add the space before a user-defined piece.
        add_tokens(tokenizer, pieces.tokens, pieces.types, normalized=not pieces.space_prefix)
    except Exception as error:  # The library raises bare Exception.
        raise _damaged(path, (str(error).splitlines() or ["pieces"])[0][:100]) from None
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    names = {f"{name}_token": i for name, i in pieces.ids.items()}
    return tokenizer, {name: pieces.tokens[i] for name, i in names.items() if 0 <= i < len(ids)}


def bpe_model(
    ids: Mapping[str, int], types: Sequence[int], scores: Sequence[float], unknown: int
) -> models.BPE:
    """A BPE model with byte fallback."""
    tokens = list(ids)
    return models.BPE(
        vocab=dict(ids),
        merges=_merges_by_score(ids, types, scores),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )


def add_tokens(
    tokenizer: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    swallowing: Collection[str] = (),
    normalized: bool = False,
) -> None:
    """Add the tokens that are matched in the text before any splitting.

    Args:
        tokenizer: tokenizer that already has its normalizer.
        tokens: all tokens, in the order of their ids.
        types: types of the tokens.
        swallowing: control tokens that consume the spaces after them.
        normalized: whether user-defined tokens are matched in normalized text, where a space is
            U+2581.
    """
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=t in swallowing) for t in special]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=normalized) for t in plain])


def _merges_by_score(
    ids: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that follow SentencePiece's rule: the best-scored token of two neighbours first.

    A token has the same score for any two parts that form it. Among these, SentencePiece prefers
    the leftmost pair of the text, but a list of merges prefers its first entry, so the order within
    one token is a convention (shorter parts first).
    """
    mergeable = {token: i for token, i in ids.items() if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    ranked = []
    for token, i in mergeable.items():
        for middle in range(1, len(token)):
            left = mergeable.get(token[:middle])
            right = mergeable.get(token[middle:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right, token[:middle], token[middle:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def make_normalizer(pieces: Pieces) -> Any:
    """SentencePiece's normalization steps, in order."""
    steps: list[Any] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.one_space:
        steps += [normalizers.Strip(), normalizers.Replace(_SPACES, " ")]
    if pieces.space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


# The file is a protocol buffer. Its wire format has four rules, and a library would need
# declarations of the fields too.


def _read_pieces(path: Path) -> Pieces:
    data = read_limited(path, _MAX_FILE_BYTES, _FETCH)
    pieces = Pieces()
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = _message(value)
                pieces.tokens.append(_bytes(piece.get(1, b"")).decode())
                pieces.scores.append(_FLOAT.unpack(_bytes(piece.get(2, b"\0\0\0\0")))[0])
                pieces.types.append(_int(piece.get(3, NORMAL)))
            elif number == 2:
                _read_trainer(pieces, _message(value))
            elif number == 3:
                _read_normalizer(pieces, _message(value))
            elif number == 5:
                pieces.changes_decoded = bool(_message(value).get(2))
    except (ValueError, IndexError) as error:  # A ValueError includes text that is not UTF-8.
        raise _damaged(path, str(error)[:100]) from None
    if not pieces.tokens:
        raise _damaged(path, "it has no pieces")
    return pieces


def _read_trainer(pieces: Pieces, settings: Mapping[int, int | bytes]) -> None:
    pieces.algorithm = _int(settings.get(3, _UNIGRAM))
    pieces.space_after = bool(settings.get(24, 0))
    for number, name in {40: "unk", 41: "bos", 42: "eos", 43: "pad"}.items():
        if number in settings:
            value = _int(settings[number])
            pieces.ids[name] = value - (1 << 64) if value >> 63 else value


def _read_normalizer(pieces: Pieces, settings: Mapping[int, int | bytes]) -> None:
    pieces.charsmap = _bytes(settings.get(2, b""))
    pieces.space_prefix, pieces.one_space, pieces.space_as_piece = (
        bool(settings.get(n, 1)) for n in (3, 4, 5)
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field in a message (https://protobuf.dev)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError("it is not a protocol buffer")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _message(value: int | bytes) -> dict[int, int | bytes]:
    return dict(_fields(_bytes(value)))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
    raise ValueError("it is not a protocol buffer")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field is a number")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field is not a number")
    return value


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound SentencePiece model: {reason}.", _FETCH)
