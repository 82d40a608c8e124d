"""Structured output: grammars compiled for a model's vocabulary, and which tokens they allow next.

llguidance does the parsing; here is what it is given, what it may cost, and how its state follows a
request's tokens. Not for the form that a grammar is written in (lark.py) nor for thinking before
the answer (thinking.py).
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

MAX_COMPILED = 16  # grammars kept; a usual one takes some 100 KB, one made to be large 50 MB


# Bounds of what was measured for grammars made to be slow: 0.5 s to compile, 15 ms per token (50
# where tables grow), and 50 MB for a request. A usual one takes 2 ms, 0.01 ms and 20 KB.
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


# A step takes time with the square of the items; a schema needs four for each property that may be
# left out.
_SCHEMA_LIMITS = _limits(10_000, 50_000)
_GRAMMAR_LIMITS = _limits(1_000, 5_000)
# By a byte of a mask: what its eight tokens' logits are bounded by. A look-up costs half of
# unpacking the bits.
_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(
        np.bool_
    ),
    np.float32(np.inf),
    np.float32(-np.inf),
)
_SOURCE_LINE = re.compile(r" *\d+ \| ")
_SPECIAL_TOKEN = b"\xff"  # llguidance's mark of what is not text: no UTF-8 has this byte


class GrammarCompiler:
    """Compiles constraints for one vocabulary.

    Safe to use from several threads; compiling lets the others run.

    Attributes:
        token_bytes: the exact bytes of each token; control tokens have their names.
        special_ids: the control tokens, which no text can bring about, those that end a sequence
            included.
        eos_token_ids: tokens that end a sequence: allowed where a grammar may end, and only they
            once it must.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        eos_token_ids: Iterable[int],
        num_logits: int,
    ) -> None:
        """`num_logits`: columns of the model's logits, which may be more than tokens."""
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
            InvalidRequestError: what llguidance or `to_lark` refuses, in one line, with the field's
                name.
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
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return GrammarConstraint(compiled, lambda: self._forget(lark), self.eos_token_ids)

    def _forget(self, lark: str) -> None:
        """Drop a grammar that failed somebody, with the tables it shares with its copies."""
        with self._lock:
            self._compiled.pop(lark, None)

    def _compile(self, lark: str, kind: str) -> LLMatcher:
        if not self.eos_token_ids:
            raise InvalidRequestError(
                "The model has no token that ends a text.", "Leave structured_outputs out."
            )
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        limits = _SCHEMA_LIMITS if kind in ("json", "json_object") else _GRAMMAR_LIMITS
        compiled = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        trial = compiled.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # shows a grammar that allows no token at all
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
        """The tokens as llguidance wants them: one per column of the logits, empty where a token is never allowed."""
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
    """What `TokenizerWrapper` asks for. Text is never encoded: grammars do not force tokens (see lark.py)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError


class GrammarConstraint:
    """One request's place in a grammar: a `Constraint`.

    The matcher is a cache of what the grammar makes of the tokens seen; it follows when tokens come
    or are taken back.
    """

    def __init__(
        self, compiled: LLMatcher, forget: Callable[[], None], ends: Collection[int] = ()
    ) -> None:
        """Begin at the start of a compiled grammar, which is not changed; `forget` is called if it fails.

        `ends` are the tokens that end a sequence.
        """
        self._ends = frozenset(ends)
        self._compiled = compiled
        self._forget = forget
        self._matcher = compiled.deep_copy()
        self._seen: list[int] = []

    def restrict(self, logits: F32, output_token_ids: Sequence[int]) -> F32:
        """See `Constraint`; a `ConstraintError` if the grammar refuses the output or reached a limit."""
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
        """See `Constraint`."""
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
            self._seen.append(token_id)  # taken back when the output turns out to be without them
        return forced

    def admits(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        """See `Constraint`."""
        self._follow(output_token_ids)
        return int(self._matcher.validate_tokens(list(draft)))

    def _follow(self, token_ids: Sequence[int]) -> None:
        kept = common_prefix_length(self._seen, token_ids)
        too_many = len(self._seen) - kept
        # A matcher that has stopped did not count what came after; one that failed cannot go back.
        if too_many and (self._matcher.is_stopped() or not self._matcher.rollback(too_many)):
            self._matcher = self._compiled.deep_copy()
            kept = 0
        new = list(token_ids[kept:])
        self._seen[kept:] = new
        if new and not self._matcher.is_stopped():  # after the end, only ends follow
            self._matcher.consume_tokens(new)


def _one_line(matcher: LLMatcher) -> str:
    """The error of a matcher without its view of the source; empty if there is none."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").splitlines()
    message = " ".join(
        " ".join(itertools.takewhile(lambda line: not _SOURCE_LINE.match(line), lines)).split()
    )
    if message == "NoExtensionBias":
        message = "no token can follow"
    message = message.removesuffix(".")
    return message if len(message) <= 300 else f"{message[:100]} ... {message[-190:]}"
