"""Text to token ids and back, for one model.

Encoding is the `tokenizers` library's, built from the model file and cached beside its index. Decoding is ours, by the
exact bytes of each token, so that streaming (detokenizer.py) and decoding at once cannot differ. Not for chat formats.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from twinphase.errors import CheckpointError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from twinphase.tokenizer.gguf_vocabulary import SPACE, build_tokenizer, pre_tokenizer
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["Tokenizer"]

# Changes whenever build_tokenizer gives something else for the same file.
_CACHE_NAME = "tokenizer-1.json"
# Tokens that end a turn in some chat format; a model may define several (llama.cpp's list).
_END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "<eos>", "</s>",
)  # fmt: skip
_LONG_TEXT = 4096  # characters; `encode_batch` lets other threads run meanwhile, `encode` is quicker to begin
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    Attributes:
        bos_token_id: the token that begins a text, or None.
        eos_token_id: the token that ends a text, or None.
        eos_token_ids: every token that ends generation: end of text, of turn, of message.
        vocab_size: number of tokens; the model's logits may have more columns.
    """

    def __init__(self, backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
        """Use `from_checkpoint`; `backend` is what `build_tokenizer` made of the file with this metadata.

        Raises:
            CheckpointError: a special id outside the vocabulary.
        """
        self._backend = backend
        # The library keeps "parse special tokens" as state of the object, so there are two; they share the vocabulary.
        self._plain = _without_special(backend)
        self._sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        self._space_prefix = self._sentencepiece and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._longest_token = 0
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

        defaults = {"bos": 1, "eos": 2} if self._sentencepiece else {}
        self.bos_token_id = self._special_id(metadata, "bos", defaults.get("bos"))
        self.eos_token_id = self._special_id(metadata, "eos", defaults.get("eos"))
        ends = [self.eos_token_id, *(self._special_id(metadata, name, None) for name in ("eot", "eom"))]
        # Only control tokens: "<EOT>" may be ordinary text to another model.
        ends += [i for i in map(backend.token_to_id, _END_TOKENS) if i in self._special]
        self.eos_token_ids = frozenset(i for i in ends if i is not None)

        adds_bos = True if self._sentencepiece else pre_tokenizer(metadata).add_bos
        self._adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
        self._adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Loads the tokenizer of a model file: from the cache, or built from the file's vocabulary and then cached.

        Raises:
            UnsupportedModelError: a kind of tokenizer or pre-tokenizer that is not supported.
            CheckpointError: a vocabulary that is missing or inconsistent.
        """
        metadata = checkpoint.metadata
        if "tokenizer.ggml.model" not in metadata:
            raise UnsupportedModelError(f"{checkpoint.path} has no tokenizer.", "Use a file with one.")
        cached = checkpoint.cache_dir / _CACHE_NAME if checkpoint.cache_dir else None
        if cached is not None and cached.is_file():
            # A damaged file is built anew; the library says so with a bare Exception.
            with contextlib.suppress(Exception):
                return cls(tokenizers.Tokenizer.from_file(str(cached)), metadata)
        backend = build_tokenizer(metadata, checkpoint.vocabulary())
        if cached is not None:
            _store(backend, cached)
        return cls(backend, metadata)

    @property
    def bos_token(self) -> str:
        return self.token_bytes(self.bos_token_id).decode() if self.bos_token_id is not None else ""

    @property
    def eos_token(self) -> str:
        return self.token_bytes(self.eos_token_id).decode() if self.eos_token_id is not None else ""

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: add BOS (and EOS) where the model wants them; False for a rendered chat template.
            parse_special: read "<|im_end|>" and the like as control tokens, not as the characters they are written in.
            max_tokens: the model's context. A text that cannot fit is refused before it is encoded, because it has
                more characters than that many of the longest tokens.

        Raises:
            InvalidRequestError: text that is not valid Unicode.
            ContextLengthError: text certain to exceed `max_tokens` (one that passes may still be too long).
        """
        if max_tokens is not None and len(text) > max_tokens:
            self._check_length(text, max_tokens)
        ids: list[int] = self._run(text, parse_special).ids
        if not add_special_tokens:
            return ids
        bos = [self.bos_token_id] if self._adds_bos and self.bos_token_id is not None else []
        eos = [self.eos_token_id] if self._adds_eos and self.eos_token_id is not None else []
        return [*bos, *ids, *eos]

    def encode_with_starts(
        self, text: str, *, control: Sequence[tuple[int, int]] | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text without BOS or EOS, and where in the text each token begins.

        Args:
            text: as for `encode`.
            control: the control tokens to read as such, ascending (character, token id), each at a place where its
                name stands in the text; those elsewhere are the characters they are written in. None: all of them.
            max_tokens: as for `encode`.

        Returns:
            The ids, and for each the index of the character that its first byte belongs to; never descending. The
            space that SentencePiece puts before a text begins with the text.

        Raises:
            InvalidRequestError: as for `encode`.
            ContextLengthError: as for `encode`.
        """
        if max_tokens is not None and len(text) > max_tokens:
            self._check_length(text, max_tokens)
        if control is None:
            encoding = self._run(text, True)
            return encoding.ids, [start for start, _ in encoding.offsets]
        # The library itself splits a text at its control tokens before all else, so encoding what lies between them
        # gives the ids that encoding the whole would give.
        ids: list[int] = []
        starts: list[int] = []
        done = 0
        for at, token_id in (*control, (len(text), None)):
            encoding = self._run(text[done:at], False)
            ids += encoding.ids
            starts += [done + start for start, _ in encoding.offsets]
            if token_id is not None:
                ids.append(token_id)
                starts.append(at)
                done = at + len(self.token_bytes(token_id).decode())
        return ids, starts

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids; those outside the vocabulary have no text.
            skip_special_tokens: leave control tokens out.
            continuation: the ids continue earlier text, so a SentencePiece space at their beginning is part of it.
        """
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        text = b"".join(map(self.token_bytes, kept))
        if self.strips_leading_space and not continuation:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; control tokens stand for their names, unknown ids for nothing."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_token_bytes(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """Control tokens are no part of the text."""
        return token_id in self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name in the vocabulary, for control tokens mostly."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def strips_leading_space(self) -> bool:
        """True if encoding puts a space before the text that decoding takes away."""
        return self._space_prefix

    def _run(self, text: str, parse_special: bool) -> tokenizers.Encoding:
        backend = self._backend if parse_special else self._plain
        try:
            if len(text) > _LONG_TEXT:
                return backend.encode_batch([text], add_special_tokens=False)[0]
            return backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError("The text is not valid Unicode.", "Send it as UTF-8.") from None

    def _make_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if token_id in self._added:
            return str(token).encode()
        if not self._sentencepiece:
            return b"".join(_BYTE_OF_CHARACTER.get(c) or c.encode() for c in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return str(token).replace(SPACE, " ").encode()

    def _special_id(self, metadata: Mapping[str, Any], name: str, default: int | None) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < self.vocab_size):
            raise CheckpointError(
                f"{name}_token_id {token_id} is outside the vocabulary of {self.vocab_size}.",
                "Convert the model again.",
            )
        return token_id

    def _check_length(self, text: str, max_tokens: int) -> None:
        if not self._longest_token:
            self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # Composing characters (NFC) can shorten a text, to a third at most in what any tokenizer here does.
        longest = self._longest_token * (3 if self._backend.normalizer is not None else 1)
        if len(text) > max_tokens * longest:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, more than {max_tokens} tokens can hold.",
                "Shorten it, or use a model with a longer context.",
            )


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """One that reads control tokens as the characters they are written in, of the same parts."""
    plain = tokenizers.Tokenizer(backend.model)
    plain.pre_tokenizer = backend.pre_tokenizer
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    # All are added, the control tokens too, so that a user-defined token that overlaps one is found as by `backend`.
    for special, add in ((True, plain.add_special_tokens), (False, plain.add_tokens)):
        add([token for token in backend.get_added_tokens_decoder().values() if token.special is special])
    plain.encode_special_tokens = True
    return plain


def _store(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Caches a built tokenizer, whole or not at all; a cache that cannot be written is no error."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        # The library reports a failed write as a bare Exception.
        with contextlib.suppress(Exception):
            backend.save(str(temporary), pretty=False)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _byte_of_character() -> dict[str, bytes]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
