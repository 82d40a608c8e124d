"""Opens the tokenizer of a Hugging Face folder: tokenizer.json, and the JSON files beside it.

The rules are those of transformers' AutoTokenizer (5.x, `TokenizersBackend`). Without
tokenizer.json, SentencePiece's tokenizer.model is read (`sentencepiece.py`), with BOS and without
EOS unless the folder says otherwise; without both, the folder is refused. `template_files.py` finds
chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.tokenizer.facts import SPACE, Spelling, TokenizerFacts
from twinphase.tokenizer.pipeline import part_steps
from twinphase.tokenizer.sentencepiece import open_pieces
from twinphase.weights.storage import read_limited

_MAX_JSON_BYTES = 256 << 20
_FETCH = "Fetch the model's folder again."
_CONVERT = (
    "Write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
)
# Decoders that only determine how tokens are spelled.
_KNOWN_DECODERS = {
    "ByteLevel",
    "Metaspace",
    "Replace",
    "ByteFallback",
    "Fuse",
    "Strip",
    "WordPiece",
}


def open_folder(
    folder: Path, config: Mapping[str, Any], rows: int | None
) -> tuple[tokenizers.Tokenizer, TokenizerFacts]:
    """A folder's tokenizer without post-processor, and the facts of the other files.

    Args:
        folder: folder with tokenizer.json or tokenizer.model; tokenizer_config.json,
            special_tokens_map.json and generation_config.json are optional.
        config: the folder's config.json.
        rows: number of rows of the model's embedding. Added tokens beyond it are ignored, such as
            Gemma 3's image token in a model without images.

    Raises:
        UnsupportedModelError: both files are missing, or the spelling of tokens is unknown.
        CheckpointError: a file is not valid.
    """
    settings = _tokenizer_config(folder)
    backend, own_names = _open_backend(folder, rows)
    names = own_names | _special_names(settings)
    _add_tokens(backend, settings, names, rows)
    bos, eos = (_token_id(backend, names.get(f"{name}_token")) for name in ("bos", "eos"))
    if own_names:
        prefix = _only(bos if settings.get("add_bos_token", True) else None)
        suffix = _only(eos if settings.get("add_eos_token", False) else None)
        middle: tuple[int, ...] = ()
    else:
        prefix, suffix = _added_around(backend)
        middle = _added_between(backend)
        # Its additions are known by now, and it would shift the starts of tokens.
        backend.post_processor = None
    size = _num_ids(backend)
    ends = [i for i in _end_ids(folder, config) if 0 <= i < size]
    spelling, strips_leading_space = _spelling(backend)
    facts = TokenizerFacts(
        vocab_size=size,
        spelling=spelling,
        names=names,
        bos_token_id=bos,
        eos_token_id=eos if eos is not None else next(iter(ends), None),
        end_token_ids=frozenset([*ends, *_only(eos)]),
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        strips_leading_space=strips_leading_space,
    )
    return backend, facts


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file does not exist.

    Raises:
        CheckpointError: the file has any other content.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_limited(path, _MAX_JSON_BYTES, _FETCH).decode())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not valid JSON.", _FETCH) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.", _FETCH)
    return value


def _open_backend(folder: Path, rows: int | None) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens' names if they come from tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer(folder / "tokenizer.json", rows)
        backend.no_truncation()
        backend.no_padding()
        return backend, {}
    if (folder / "tokenizer.model").is_file():
        return open_pieces(folder / "tokenizer.model")
    others = ("tekken.json", "vocab.json", "vocab.txt", "tiktoken.model")
    there = next((name for name in others if (folder / name).is_file()), None)
    what = f"has {there}, but no tokenizer.json" if there else "has no tokenizer.json"
    raise UnsupportedModelError(f"{folder} {what}.", _CONVERT)


def _read_tokenizer(path: Path, rows: int | None) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        if rows is None or backend.get_vocab_size(with_added_tokens=True) <= rows:
            return backend
        content = read_json(path)
        content["added_tokens"] = [
            token for token in content.get("added_tokens", ()) if token["id"] < rows
        ]
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except CheckpointError:
        raise
    except BaseException as error:
        # The library raises bare Exception, and its panics are BaseExceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{path} is not a valid tokenizer: {reason}.", _FETCH) from None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, amended by special_tokens_map.json in older folders."""
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= read_json(folder / "special_tokens_map.json")
    return settings


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    extra = settings.get("extra_special_tokens")
    named = {**settings, **(extra if isinstance(extra, dict) else {})}
    texts = {key: _content(value) for key, value in named.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if text}


def _content(value: Any) -> str | None:
    """The text of a token, which is stored as a string or as an object with settings."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    found: int | None = backend.token_to_id(token) if token is not None else None
    return found


def _add_tokens(
    backend: tokenizers.Tokenizer,
    settings: Mapping[str, Any],
    names: Mapping[str, str],
    rows: int | None,
) -> None:
    """Add tokens that only tokenizer_config.json has, and make named tokens special."""
    listed = settings.get("added_tokens_decoder")
    items = listed.items() if isinstance(listed, dict) else ()
    entries = {int(key): entry for key, entry in items if re.fullmatch("[0-9]{1,9}", key)}
    for _, entry in sorted(entries.items()):
        has_row = rows is None or backend.get_vocab_size(with_added_tokens=True) < rows
        if has_row and (text := _content(entry)) and backend.token_to_id(text) is None:
            backend.add_tokens([_added_token(text, entry)])
    extra = [settings.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    more = [_content(value) for values in extra if isinstance(values, list) for value in values]
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for text in dict.fromkeys([*names.values(), *more]):
        if text and text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _added_token(text: str, entry: Any) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    settings = entry if isinstance(entry, dict) else {}
    return AddedToken(text, **{flag: bool(settings[flag]) for flag in flags if flag in settings})


def _only(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


def _num_ids(backend: tokenizers.Tokenizer) -> int:
    count: int = backend.get_vocab_size(with_added_tokens=True)
    # This is several times faster than reading the whole table.
    if all(backend.id_to_token(i) is not None for i in range(count)):
        return count
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _added_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor adds around a text, which override the config."""
    encoding = backend.encode("a", add_special_tokens=True)
    ids = encoding.ids
    added = encoding.special_tokens_mask
    if 0 not in added:
        return tuple(ids), ()
    return tuple(ids[: added.index(0)]), tuple(ids[len(ids) - added[::-1].index(0) :])


def _added_between(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids that the post-processor adds between two texts."""
    encoding = backend.encode("a", "a", add_special_tokens=True)
    texts = encoding.sequence_ids
    if 0 not in texts:
        return ()
    return tuple(encoding.ids[len(texts) - texts[::-1].index(0) : texts.index(1)])


def _end_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer, from generation_config.json or else config.json."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    for source in (read_json(folder / "generation_config.json"), config, inner):
        ids = source.get("eos_token_id")
        if ids is not None:
            return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]
    return []


def _spelling(backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """The spelling of tokens, and whether decoding removes a leading space, from the decoder."""
    steps = part_steps(backend.decoder) or part_steps(backend.pre_tokenizer)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL, False
    unknown = sorted(kinds - _KNOWN_DECODERS)
    if backend.decoder is None or unknown:
        raise UnsupportedModelError(
            f"The tokenizer's decoder {unknown[0] if unknown else 'None'!r} is not supported.",
            "Use a model with a byte-level, SentencePiece or WordPiece tokenizer.",
        )
    if "WordPiece" in kinds:
        return Spelling.WORDPIECE, True
    spaces = [step.get("replacement") or step.get("pattern", {}).get("String") for step in steps]
    if SPACE not in spaces:
        raise UnsupportedModelError(
            "The tokenizer does not say how it writes spaces.",
            "Use a model with a byte-level, SentencePiece or WordPiece tokenizer.",
        )
    strips = any(
        step.get("start") or step.get("prepend_scheme", "never") != "never" for step in steps
    )
    return Spelling.SENTENCEPIECE, strips
