"""One declaration per configuration field: its default, help text and allowed values.

`check_settings` refuses other values; the command line's options are made of the same declarations
(`arguments.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from twinphase.errors import InvalidRequestError


@dataclass(frozen=True)
class ConfigField:
    """What is declared of a field besides its type.

    Attributes:
        help: one sentence, with the unit; also the field's documentation.
        minimum, maximum: both are allowed themselves.
        above: only values greater than this are allowed.
        choices: the only values allowed, if there are any.
        words: allowed beside numbers.
        default_text: what a default of None means, for the help.
        option: the option's name, where it is not the field's.
        short: another name of the option, dashes included.
        environment: variable that gives the option's value, too.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    default_text: str = ""
    option: str | None = None
    short: str | None = None
    environment: str | None = None

    def allowed(self, kind: str) -> str:
        """The allowed values in words."""
        if self.choices:
            return f"one of: {', '.join(self.choices)}"
        if kind == "bool":
            return "true or false"
        noun = "an integer" if kind == "int" else "a number"
        bounds = (("above", self.above), ("from", self.minimum), ("up to", self.maximum))
        number = " ".join(
            [noun, *(f"{word} {_exact(bound)}" for word, bound in bounds if bound is not None)]
        )
        return ", or ".join([number, " or ".join(self.words)]) if self.words else number

    def allows(self, value: Any, kind: str) -> bool:
        if self.choices:
            return value in self.choices
        if self.words and isinstance(value, str):
            return value in self.words
        if kind == "bool":
            return isinstance(value, bool)
        if kind not in ("int", "float"):
            return True
        if isinstance(value, bool) or not isinstance(
            value, (int, float) if kind == "float" else int
        ):
            return False
        low = self.minimum
        above = self.above
        high = self.maximum
        in_range = (
            (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
        )
        return in_range and math.isfinite(value)


def _exact(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"


def setting(default: Any, help: str, **declared: Any) -> Any:  # noqa: A002
    """A dataclass field with this default and a `ConfigField`."""
    return field(default=default, metadata={"setting": ConfigField(help, **declared)})


@cache
def settings_of(kind: Any) -> dict[str, tuple[str, Any, ConfigField]]:
    """Written type, default and declaration of each declared field of a configuration."""
    return {
        one.name: (str(one.type), one.default, one.metadata["setting"])
        for one in fields(kind)
        if "setting" in one.metadata
    }


def check_settings(config: Any) -> None:
    """Refuse a configuration with values that its declarations do not allow.

    Raises:
        InvalidRequestError: with the field's name, its value, and what is allowed.
    """
    for name, (kind, default, declared) in settings_of(config.__class__).items():
        value = getattr(config, name)
        if value is not default and (value is not None or "None" not in kind):
            check_value(name, value, kind.removesuffix(" | None").removesuffix(" | str"), declared)


def check_value(name: str, value: Any, kind: str, declared: ConfigField) -> None:
    """Refuse one value.

    Raises:
        InvalidRequestError: as for `check_settings`.
    """
    if not declared.allows(value, kind):
        raise InvalidRequestError(f"{name} is {value!r}.", f"Use {declared.allowed(kind)}.")
