"""Encodes text to token ids and decodes them, for one model.

The `tokenizers` library encodes, from a folder's tokenizer.json, or from a GGUF file's vocabulary,
which is cached beside its index. Decoding uses the exact bytes of each token, so that streaming
(detokenizer.py) and decoding at once cannot differ.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import tokenizers

from twinphase.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedModelError,
)
from twinphase.tokenizer.facts import SPACE, Spelling, TokenizerFacts
from twinphase.tokenizer.folder import open_folder
from twinphase.tokenizer.gguf_vocabulary import build_tokenizer, gguf_facts
from twinphase.tokenizer.kept import keep_tokenizer, load_tokenizer
from twinphase.tokenizer.pipeline import after_control, keeps_length, without_special
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.storage import write_atomically

# The number changes whenever build_tokenizer returns another result for the same file.
_CACHE_NAME = "tokenizer-3.msgpack"
# Texts with more characters use `encode_batch`, which lets other threads run; `encode` starts
# faster.
_LONG_TEXT = 4096
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one model; several threads may use it.

    Attributes:
        bos_token_id: id of the token at the start of a text, or None.
        eos_token_id: id of the token at the end of a text, or None.
        eos_token_ids: ids of all tokens that end generation: end of text, of turn, of message.
        vocab_size: number of tokens; the model's logits may have more columns.
        spelling: how the vocabulary spells the bytes of a token.
        special_names: the texts of special tokens by the names that chat templates use, such as
            "bos_token".
        strips_leading_space: whether encoding adds a space before the text, which decoding removes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        """Call `from_checkpoint` instead; `backend` must not have a post-processor."""
        self._backend = backend
        # The library stores "parse special tokens" in the object, so there are two tokenizers,
        # which share the vocabulary.
        self._plain = without_special(backend)
        self._after_control = after_control(self._plain)
        self.spelling = facts.spelling
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self._prefix = facts.prefix
        self._suffix = facts.suffix
        self._middle = facts.middle
        self._bytes: dict[int, bytes] = {}
        self._longest_token = 0
        self.vocab_size = facts.vocab_size
        self.bos_token_id = facts.bos_token_id
        self.eos_token_id = facts.eos_token_id
        self.eos_token_ids = facts.end_token_ids
        self.special_names = facts.names
        self.strips_leading_space = facts.strips_leading_space

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a model's folder or GGUF file, built once and then cached.

        Raises:
            UnsupportedModelError: there is no tokenizer, or its kind or pre-tokenizer is not
                supported.
            CheckpointError: the vocabulary is missing, inconsistent, or larger than the model's
                embedding.
        """
        embedding = checkpoint.tensors.get("token_embd.weight")
        rows = embedding.shape[0] if embedding is not None else None
        if checkpoint.config is not None:
            tokenizer = cls(*open_folder(checkpoint.path, checkpoint.config, rows))
        else:
            tokenizer = cls._from_gguf(checkpoint)
        if rows is not None and tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"The tokenizer has {tokenizer.vocab_size} tokens, the model's embedding only "
                f"{rows} rows.",
                "Use the tokenizer that belongs to the model.",
            )
        return tokenizer

    @classmethod
    def _from_gguf(cls, checkpoint: Checkpoint) -> Tokenizer:
        metadata = checkpoint.metadata
        if "tokenizer.ggml.model" not in metadata:
            raise UnsupportedModelError(
                f"{checkpoint.path} has no tokenizer.", "Use a file with one."
            )
        cached = checkpoint.cache_dir / _CACHE_NAME if checkpoint.cache_dir else None
        if cached is not None and cached.is_file():
            # A damaged file is built again; the library reports damage as a bare Exception.
            with contextlib.suppress(Exception):
                backend = load_tokenizer(cached.read_bytes())
                return cls(backend, gguf_facts(metadata, backend))
        backend = build_tokenizer(metadata, checkpoint.vocabulary())
        if cached is not None:
            # An unwritable cache is not an error.
            with contextlib.suppress(OSError):
                write_atomically(cached, keep_tokenizer(backend))
        return cls(backend, gguf_facts(metadata, backend))

    @property
    def bos_token(self) -> str:
        return self.special_names.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        return self.special_names.get("eos_token", "")

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
        truncate_to: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: add BOS, EOS, [CLS] or [SEP] if the model uses them; False for a
                rendered chat template.
            parse_special: encode "<|im_end|>" and the like as control tokens instead of plain
                characters.
            max_tokens: maximum length. A text with more characters than this number of the longest
                tokens is refused before it is encoded.
            truncate_to: number of tokens, including added ones, to which the text is cut at its
                end.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
            ContextLengthError: the text certainly exceeds `max_tokens`; other texts may still be
                too long.
        """
        if max_tokens is not None and len(text) > max_tokens:
            self._check_length(text, max_tokens)
        ids: list[int] = self._run(text, parse_special).ids
        if truncate_to is not None:
            ids = ids[: max(0, truncate_to - len(self._prefix) - len(self._suffix))]
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        max_tokens: int | None = None,
        truncate_to: int | None = None,
    ) -> tuple[list[int], int]:
        """Token ids of a pair of texts for an encoder, and the start of the second text.

        Args:
            first: first text, as for `encode`.
            second: second text.
            max_tokens: as for `encode`.
            truncate_to: maximum tokens of the pair. First the end of the longer text is cut, then
                the ends of both, as in transformers' `longest_first`. None does not truncate.

        Raises:
            InvalidRequestError: as for `encode`.
            ContextLengthError: as for `encode`.
        """
        if max_tokens is not None and max(len(first), len(second)) > max_tokens:
            self._check_length(max(first, second, key=len), max_tokens)
        first_ids = self._run(first, True).ids
        second_ids = self._run(second, True).ids
        if truncate_to is not None:
            num_added = len(self._prefix) + len(self._middle) + len(self._suffix)
            excess = len(first_ids) + len(second_ids) + num_added - truncate_to
            room = max(0, truncate_to - num_added)
            shorter = min(len(first_ids), len(second_ids), room // 2)
            if excess > 0 and len(first_ids) <= len(second_ids):
                first_ids = first_ids[:shorter]
                second_ids = second_ids[: room - shorter]
            elif excess > 0:
                first_ids = first_ids[: room - shorter]
                second_ids = second_ids[:shorter]
        ids = [*self._prefix, *first_ids, *self._middle]
        return [*ids, *second_ids, *self._suffix], len(ids)

    def encode_with_starts(
        self,
        text: str,
        *,
        control: Sequence[tuple[int, int]] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Token ids of a text without BOS or EOS, and the start of each token in the text.

        Args:
            text: as for `encode`.
            control: control tokens as ascending (character, token id), at positions where the text
                contains their names; elsewhere such names are plain characters. None stands for all
                of them.
            max_tokens: as for `encode`.

        Returns:
            The ids, and for each id the index of the character that contains its first byte, in
            ascending order. The space that SentencePiece adds before a text starts at the text's
            start.

        Raises:
            InvalidRequestError: as for `encode`.
            ContextLengthError: as for `encode`.
        """
        if max_tokens is not None and len(text) > max_tokens:
            self._check_length(text, max_tokens)
        if control is None:
            encoding = self._run(text, True)
            starts = [start for start, _ in encoding.offsets]
            for k, token_id in enumerate(encoding.ids):
                if (token := self._added.get(token_id)) is not None and token.lstrip:
                    starts[k] = max(text.find(token.content, starts[k]), starts[k])
            return encoding.ids, starts
        # The library itself splits a text at its control tokens first, so encoding the parts in
        # between gives the same ids as encoding the whole, once the spaces that some control tokens
        # consume are removed.
        ids: list[int] = []
        starts = []
        done = 0
        for at, token_id in control:
            token = self._added[token_id]
            between = text[done:at].rstrip() if token.lstrip else text[done:at]
            self._append(between, done, ids, starts)
            ids.append(token_id)
            starts.append(at)
            done = at + len(token.content)
            if token.rstrip:
                done = len(text) - len(text[done:].lstrip())
        self._append(text[done:], done, ids, starts)
        return ids, starts

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, continuation: bool = False
    ) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids; those outside the vocabulary have no text.
            skip_special_tokens: omit control tokens.
            continuation: whether the ids continue earlier text, so that a leading SentencePiece
                space is kept.
        """
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        text = b"".join(map(self.token_bytes, kept))
        if self.strips_leading_space and not continuation:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token: a control token's name, and nothing for an unknown id."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._make_token_bytes(token_id)
        return self._bytes[token_id]

    @property
    def adds_bos(self) -> bool:
        """Whether encoding adds the BOS token."""
        return self.bos_token_id is not None and self.bos_token_id in self._prefix

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which is not part of the text."""
        return token_id in self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name in the vocabulary; mostly for control tokens."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def name(self, token_id: int) -> str:
        """The token as spelled in the vocabulary; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def names(self) -> dict[int, str]:
        """All tokens as spelled in the vocabulary, by id."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {token_id: name for name, token_id in vocabulary.items()}

    def _append(self, text: str, at: int, ids: list[int], starts: list[int]) -> None:
        """Append the tokens of a part of a text that begins at character `at`, and their starts."""
        encoding = self._run(text, False, begins=at == 0)
        ids += encoding.ids
        starts += [at + start for start, _ in encoding.offsets]

    def _run(self, text: str, parse_special: bool, *, begins: bool = True) -> tokenizers.Encoding:
        backend = self._backend if parse_special else self._plain if begins else self._after_control
        try:
            if len(text) > _LONG_TEXT:
                return backend.encode_batch([text], add_special_tokens=False)[0]
            return backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError(
                "The text is not valid Unicode.", "Send it as UTF-8."
            ) from None

    def _make_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        added = token_id in self._added
        if token_id in self._special or (added and self.spelling is not Spelling.SENTENCEPIECE):
            return str(token).encode()
        if self.spelling is Spelling.BYTE_LEVEL:
            return b"".join(_BYTE_OF_CHARACTER.get(c) or c.encode() for c in token)
        if self.spelling is Spelling.WORDPIECE:
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        if not added and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return str(token).replace(SPACE, " ").encode()

    def _check_length(self, text: str, max_tokens: int) -> None:
        if self.spelling is Spelling.WORDPIECE or not keeps_length(self._backend.normalizer):
            return  # A text of spaces has no tokens.
        if not self._longest_token:
            self._longest_token = max(
                map(len, self._backend.get_vocab(with_added_tokens=True)), default=1
            )
        longest = self._longest_token * (3 if self._backend.normalizer is not None else 1)
        if len(text) > max_tokens * longest:
            raise ContextLengthError(
                f"The prompt has {len(text)} characters, more than {max_tokens} tokens can hold.",
                "Shorten it, or use a model with a longer context.",
            )


def _byte_of_character() -> dict[str, bytes]:
    """The byte for each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
