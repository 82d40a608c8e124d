"""The form that an output must have: as a user requests it, and as the engine enforces it.

Not for compiling it (`sampling/structured.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from twinphase.errors import InvalidRequestError

# In bytes, or in characters of JSON.
MAX_GRAMMAR_SIZE = 65536
MAX_JSON_DEPTH = 32
MAX_CHOICES = 1024
# Errors of requests that fail by their own grammar begin so.
CONSTRAINT_FAILURE = "The structured output ends"


def reject(name: str, value: object, allowed: str) -> NoReturn:
    """Refuse the value of a field; `allowed` says what it may be."""
    raise InvalidRequestError(f"{name} is {value!r}.", f"Use {allowed}.")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that the output must have: exactly one of six constraints, named as in vLLM.

    Attributes:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole output matches, in the syntax of Rust's `regex`,
            with the classes of digits, words and spaces of ASCII.
        choice: texts; the output is one of them.
        grammar: in Lark, or in GBNF (EBNF with `::=`) as llama.cpp has it.
        json_object: any JSON object.
        structural_tag: {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...],
            "triggers": [...]}, as an object or as text: free text; a trigger in it begins a
            structure that follows its schema.
        disable_any_whitespace: JSON without whitespace between its tokens.
        whitespace_pattern: what may stand between the tokens of JSON instead, a regular expression.

    Raises:
        InvalidRequestError: no constraint or several, one of a wrong type, too large or too deep,
            or not valid Unicode.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}.",
                f"Give exactly one of {', '.join(_CONSTRAINTS)}.",
            )
        kind = given[0]
        value = getattr(self, given[0])
        if kind in ("json", "structural_tag"):
            plain_json(f"structured_outputs.{kind}", value)
        elif kind == "json_object":
            if value is not True:
                reject("structured_outputs.json_object", value, "true")
        elif kind == "choice":
            if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_CHOICES:
                reject(
                    "structured_outputs.choice",
                    type(value).__name__,
                    f"a list of 1 to {MAX_CHOICES} texts",
                )
            _check_texts("structured_outputs.choice", value)
        else:
            _check_texts(f"structured_outputs.{kind}", [value])
        if self.whitespace_pattern is not None:
            _check_texts("structured_outputs.whitespace_pattern", [self.whitespace_pattern])
        options = bool(self.whitespace_pattern) + bool(self.disable_any_whitespace)
        if options > (kind in ("json", "json_object", "structural_tag")):
            raise InvalidRequestError(
                f"structured_outputs.{kind} is given with {options} options for JSON's whitespace.",
                "Give disable_any_whitespace or whitespace_pattern, and only where the output is "
                "JSON.",
            )

    @property
    def kind(self) -> str:
        """The name of the constraint that was given."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def plain_json(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """The JSON object in a text or a mapping, checked to be small, flat and plain.

    `name` is the field's, for errors.

    Raises:
        InvalidRequestError: not a JSON object, too large or nested too deep, a number that JSON
            (NaN) or 64 bits do not hold, or text that is not valid Unicode.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if len(text) > MAX_GRAMMAR_SIZE:
            raise ValueError(f"it has {len(text)} characters, and {MAX_GRAMMAR_SIZE} are allowed")
        found = json.loads(text, parse_int=_int64)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        if not isinstance(found, dict) or not isinstance(value, str) and found != value:
            raise TypeError(f"it is a {type(found).__name__}, or holds what JSON has not")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} cannot be used: {error}.", "Send a plain JSON object."
        ) from None
    level: list[object] = [found]
    for _ in range(MAX_JSON_DEPTH):
        holders = [
            item.values() if isinstance(item, dict) else item
            for item in level
            if isinstance(item, (dict, list))
        ]
        level = [child for holder in holders for child in holder]
    if level:
        raise InvalidRequestError(
            f"{name} is nested deeper than {MAX_JSON_DEPTH} levels.", "Use $defs and $ref."
        )
    return found


def _int64(digits: str) -> int:
    value = int(digits)
    if not -(2**63) <= value < 2**63:
        raise ValueError("an integer does not fit 64 bits")
    return value


def _check_texts(name: str, texts: Sequence[object]) -> None:
    size = 0
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(
                f"{name} has a {type(text).__name__} or an empty text.", "Use text."
            )
        try:
            size += len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{name} is not valid Unicode.", "Send it without lone surrogates."
            ) from None
    if size > MAX_GRAMMAR_SIZE:
        raise InvalidRequestError(
            f"{name} has {size} bytes; {MAX_GRAMMAR_SIZE} are allowed.", "Shorten it."
        )


class Constraint(Protocol):
    """What the tokens of one request must obey: a function of the request's output so far.

    It may remember what it has seen, to be quick, but preemption, a step computed again or tokens
    taken back change nothing in what it answers.
    """

    def restrict(self, logits: Any, output_token_ids: Sequence[int]) -> Any:
        """The logits of the next token with -inf where a token is forbidden.

        Args:
            logits: float32 [vocab_size]; stays as it was.
            output_token_ids: all of the request's output.

        Raises:
            Exception: the constraint cannot go on; the request fails with the message.
        """
        ...

    def forced(self, output_token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that must follow an output; none that ends it."""
        ...

    def admits(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> int:
        """Leading tokens of `draft` that may follow an output; may be an upper bound."""
        ...


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are equal; fast if `second` begins with all of `first`."""
    if second[: len(first)] == first:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (old, new) in pairs if old != new), shorter)
