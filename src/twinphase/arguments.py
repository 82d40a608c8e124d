"""What the command line's arguments mean: a model's name or a prompt, JSON, sampling parameters.

Nothing heavy is imported: the time to the first token counts from the start of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from twinphase.errors import InvalidRequestError

__all__ = ["fields_of", "is_model_name", "parse_json", "read_prompt", "sampling_params"]

ALIASES = {"smollm2"}  # as weights/hub.py has them, which is not imported just to look at an argument


def is_model_name(text: str) -> bool:
    """Whether a lone argument of `run` names a model; otherwise it is the prompt."""
    if text.startswith(("pypi:", "hf:")) or text.lower().endswith(".gguf") or text in ALIASES:
        return True
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long, or a NUL: no path
        return False


def decoded(data: bytes, source: str) -> str:
    """UTF-8 text.

    Raises:
        InvalidRequestError: naming the source and the first byte that is no UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source} is not UTF-8 text: byte {error.start:,} is 0x{data[error.start]:02x}.",
            "Convert it first, for example with `iconv -t utf-8`.",
        ) from None


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """The prompt with the file's and stdin's text appended; None if there is none and a person can be asked."""
    parts = []
    if prompt is not None:
        parts.append(decoded(prompt.encode(errors="surrogateescape"), "The prompt"))
    if file is not None:
        try:
            parts.append(decoded(file.read_bytes(), str(file)))
        except OSError as error:
            raise InvalidRequestError(f"Cannot read {file}: {error.strerror}.", "Give --file a text file.") from None
    if sys.stdin is not None and not sys.stdin.isatty():
        parts.append(decoded(sys.stdin.buffer.read(), "Standard input"))
    elif not parts:
        return None
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise InvalidRequestError("The prompt is empty.", "Give it as an argument, on stdin or with --file.")
    return text


def parse_logit_bias(pairs: list[str]) -> dict[int, float] | None:
    """ID=BIAS pairs of the command line."""
    try:
        return {int(key): float(value) for key, _, value in (pair.partition("=") for pair in pairs)} or None
    except ValueError:
        raise InvalidRequestError(f"--logit-bias is {' '.join(pairs)!r}.", "Use ID=BIAS, such as 42=-5.") from None


def parse_json(option: str, text: str | None) -> Any:
    """The value of an option that takes a JSON object; None if it was not given."""
    if text is None:
        return None
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"{option} is no JSON: {error}.", "Give an object, in single quotes.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{option} is no JSON object.", "Give an object, in single quotes.")
    return value


def parse_structured_outputs(text: str | None) -> Any:
    """The fields of vLLM's `structured_outputs`, from JSON."""
    fields = parse_json("--structured-outputs", text)
    if fields is None:
        return None
    from twinphase.request import StructuredOutputsParams

    try:
        return StructuredOutputsParams(**fields)
    except TypeError:
        raise InvalidRequestError(
            f"--structured-outputs has the keys {', '.join(fields)}.", "Use json, regex, choice or grammar."
        ) from None


def sampling_params(given: dict[str, Any]) -> Any:
    """`SamplingParams` of the options of `run`."""
    from twinphase.request import SamplingParams

    parsed = {
        "stop": given["stop"] or None,
        "stop_token_ids": given["stop_token_ids"] or None,
        "logit_bias": parse_logit_bias(given["logit_bias"]),
        "structured_outputs": parse_structured_outputs(given["structured_outputs"]),
    }
    return SamplingParams(
        **{name: given[name] for name in set(SamplingParams.__dataclass_fields__) & set(given)} | parsed
    )


def fields_of(kind: Any, given: dict[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """The options that are fields of a configuration and were given."""
    names = set(kind.__dataclass_fields__) - set(without)
    return {name: given[name] for name in names if given.get(name) is not None}
