"""Structured output: compiles grammars for a model's vocabulary; masks the tokens they exclude.

llguidance parses. This module gives it the vocabulary and limits, and keeps its state in line with
a request's tokens. `lark.py` writes the grammars; `thinking.py` handles thinking before the answer.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from twinphase.constraint import (
    CONSTRAINT_FAILURE,
    StructuredOutputsParams,
    common_prefix_length,
)
from twinphase.errors import InvalidRequestError
from twinphase.sampling.lark import to_lark
from twinphase.sampling.sampler import ConstraintError

F32 = NDArray[np.float32]

# A typical compiled grammar takes about 100 KB, one made to be large 50 MB.
MAX_COMPILED_GRAMMARS = 16


# With these limits, grammars made to be slow took at most 0.5 s to compile, 15 ms per token (50 ms
# where tables grow) and 50 MB per request. A typical grammar takes 2 ms, 0.01 ms and 20 KB.
def _limits(items_in_row: int, step_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=items_in_row,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=500_000,
        step_max_items=step_items,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


# Time of a step grows with the square of the items; a schema needs four items per optional
# property.
SCHEMA_LIMITS = _limits(10_000, 50_000)
_GRAMMAR_LIMITS = _limits(1_000, 5_000)
# Upper bounds of eight logits by byte of the mask. A look-up takes half the time of unpacking bits.
_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(
        np.bool_
    ),
    np.float32(np.inf),
    np.float32(-np.inf),
)
_SOURCE_LINE = re.compile(r" *\d+ \| ")
# llguidance's prefix of control tokens; UTF-8 does not contain this byte.
_SPECIAL_TOKEN = b"\xff"


class GrammarCompiler:
    """Compiles constraints for one vocabulary.

    Thread-safe; other threads run during compilation.

    Attributes:
        token_bytes: the exact bytes of each token; control tokens have their names.
        special_ids: control tokens, which no text contains, including those that end a sequence.
        eos_token_ids: tokens that end a sequence; the only tokens allowed after the grammar's end.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        eos_token_ids: Iterable[int],
        num_logits: int,
    ) -> None:
        """`num_logits`: columns of the model's logits, at least the number of tokens."""
        self.token_bytes = token_bytes
        self.eos_token_ids = sorted(eos_token_ids)
        self.special_ids = frozenset(special_ids) | frozenset(self.eos_token_ids)
        self._num_logits = num_logits
        self._names = {
            token_bytes[i].decode("utf-8", "replace"): i
            for i in sorted(self.special_ids)
            if token_bytes[i]
        }
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """The constraint of one request.

        Raises:
            InvalidRequestError: llguidance or `to_lark` refuses it; names the field and reason.
        """
        lark = to_lark(params, self._names)
        with self._lock:
            compiled = self._compiled.get(lark)
            if compiled is not None:
                self._compiled.move_to_end(lark)
        if compiled is None:
            compiled = self._compile(lark, params.kind)
            with self._lock:
                self._compiled[lark] = compiled
                while len(self._compiled) > MAX_COMPILED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return GrammarConstraint(compiled, lambda: self._forget(lark), self.eos_token_ids)

    def _forget(self, lark: str) -> None:
        """Drop a grammar that failed, with the tables that its copies share."""
        with self._lock:
            self._compiled.pop(lark, None)

    def _compile(self, lark: str, kind: str) -> LLMatcher:
        if not self.eos_token_ids:
            raise InvalidRequestError(
                "The model has no token that ends a text.", "Leave structured_outputs out."
            )
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        limits = SCHEMA_LIMITS if kind in ("json", "json_object") else _GRAMMAR_LIMITS
        compiled = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        trial = compiled.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # Fails if the grammar allows no token at all.
        reason = _one_line(trial) or "; ".join(compiled.get_grammar_warnings())
        if reason:
            raise InvalidRequestError(
                f"structured_outputs.{kind} is refused: {reason}.", "Change it, or leave it out."
            )
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(
                    _Vocabulary(self._marked_tokens(), self.eos_token_ids[0])
                )
                self._tokenizer = LLTokenizer(wrapper, eos_token=self.eos_token_ids)
            return self._tokenizer

    def _marked_tokens(self) -> list[bytes]:
        """Bytes of one token per column of the logits; empty for tokens that are never allowed."""
        tokens = [
            _SPECIAL_TOKEN + text
            if i in self.special_ids
            else b""
            if text.startswith(_SPECIAL_TOKEN)
            else text
            for i, text in enumerate(self.token_bytes[: self._num_logits])
        ]
        return tokens + [b""] * (self._num_logits - len(tokens))


class _Vocabulary:
    """Arguments of `TokenizerWrapper`. No text is encoded, since no tokens are forced (lark.py)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError


class GrammarConstraint:
    """The state of one request in a grammar: a `Constraint`.

    The matcher caches the state after the tokens seen; added and removed tokens update it.
    """

    def __init__(
        self, compiled: LLMatcher, forget: Callable[[], None], ends: Collection[int] = ()
    ) -> None:
        """Begin at the start of a compiled grammar, which is shared; call `forget` if it fails.

        `ends` are the tokens that end a sequence.
        """
        self._ends = frozenset(ends)
        self._compiled = compiled
        self._forget = forget
        self._matcher = compiled.deep_copy()
        self._seen: list[int] = []

    def restrict(self, logits: F32, output_token_ids: Sequence[int]) -> F32:
        """As `Constraint`; `ConstraintError` if the grammar refuses the output or hits a limit."""
        try:
            self._follow(output_token_ids)
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                reason = _one_line(self._matcher)
                raise ConstraintError(
                    f"{CONSTRAINT_FAILURE} after {len(self._seen)} tokens: {reason}."
                )
        except BaseException:
            self._forget()
            raise
        return np.minimum(logits, _BOUNDS.take(bits, axis=0).ravel()[: len(logits)])

    def forced(self, output_token_ids: Sequence[int], limit: int) -> list[int]:
        self._follow(output_token_ids)
        forced: list[int] = []
        while len(forced) < limit and not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            (set_bytes,) = bits.nonzero()
            if len(set_bytes) != 1 or (byte := int(bits[set_bytes[0]])) & byte - 1:
                break
            token_id = 8 * int(set_bytes[0]) + byte.bit_length() - 1
            if token_id in self._ends or not self._matcher.consume_token(token_id):
                break
            forced.append(token_id)
            self._seen.append(token_id)  # Rolled back if the output continues differently.
        return forced

    def admits(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        self._follow(output_token_ids)
        return int(self._matcher.validate_tokens(list(draft)))

    def _follow(self, token_ids: Sequence[int]) -> None:
        kept = common_prefix_length(self._seen, token_ids)
        too_many = len(self._seen) - kept
        # A stopped matcher does not count later tokens, and a failed one cannot roll back.
        if too_many and (self._matcher.is_stopped() or not self._matcher.rollback(too_many)):
            self._matcher = self._compiled.deep_copy()
            kept = 0
        new = list(token_ids[kept:])
        self._seen[kept:] = new
        if new and not self._matcher.is_stopped():  # After the end, only end tokens follow.
            self._matcher.consume_tokens(new)


def _one_line(matcher: LLMatcher) -> str:
    """The error of a matcher without its source excerpt; empty if there is none."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").splitlines()
    message = " ".join(
        " ".join(itertools.takewhile(lambda line: not _SOURCE_LINE.match(line), lines)).split()
    )
    if message == "NoExtensionBias":
        message = "no token can follow"
    message = message.removesuffix(".")
    return message if len(message) <= 300 else f"{message[:100]} ... {message[-190:]}"
