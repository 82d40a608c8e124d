"""The Jinja environment that chat templates run in: immutable, with Hugging Face's helpers, and with a budget.

Jinja's sandbox keeps a template from Python's internals and from single endless ranges. It does not keep it from loops
inside loops, or from making gigabytes out of a few characters; this module does. Not for choosing or filling templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser

__all__ = ["ENVIRONMENT", "budget"]

_MAX_STEPS = 1_000_000  # loop iterations, calls, operations, and characters made (64 a step) of one rendering
_CHARACTERS_PER_STEP = 64
_MAX_BITS = 100_000  # of an integer
_MAX_LENGTH = 4_000_000  # characters or elements of anything a template makes, if its input is not longer
_MAX_EXPONENT = 64
# A number of four digits, or a width taken from an argument, in a format string: padding without end.
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")
_UNBOUNDED_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map"})
# The filters that templates use and that make nothing longer than its input, unless bounded below.
_FILTERS = frozenset(
    {"abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format"}
    | {"groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "pprint"}
    | {"reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string"}
    | {"striptags", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount"}
)

_budget: ContextVar[tuple[list[int], int]] = ContextVar("budget")


@contextmanager
def budget(input_length: int) -> Iterator[int]:
    """Gives what is rendered inside a fresh budget; yields the most characters that anything may have.

    Args:
        input_length: characters of the messages, which may be longer than the limit for what a template makes.
    """
    limit = _MAX_LENGTH + 4 * input_length
    token = _budget.set(([_MAX_STEPS + input_length], limit))
    try:
        yield limit
    finally:
        _budget.reset(token)


def _spend(count: int = 1) -> None:
    steps, _ = _budget.get()
    steps[0] -= count
    if steps[0] < 0:
        raise TemplateRuntimeError("it takes too many steps")


def _check_length(length: int) -> None:
    limit = _budget.get()[1]
    if length > limit:
        raise TemplateRuntimeError(f"it makes a text or list longer than {limit}")


def _checked(value: Any) -> Any:
    """Passes on what an operation made, if it is not too large and not one too many."""
    length = _length(value)
    _check_length(length)
    _spend(1 + length // _CHARACTERS_PER_STEP)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise TemplateRuntimeError("it makes a number that is too large")
    return value


def _measured(value: Any) -> Any:
    """Passes on what is to be written or compared, if it is not too large with all that is nested in it."""
    if isinstance(value, (list, tuple, dict)):
        total, inner = 0, [value]
        while inner:
            part = inner.pop()
            total += 2 + _length(part)
            _spend(1 + _length(part) // _CHARACTERS_PER_STEP)
            if isinstance(part, (list, tuple)):
                inner.extend(part)
            elif isinstance(part, dict):
                inner.extend((*part.keys(), *part.values()))
        _check_length(total)
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend()
        yield value


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_length(sum(map(len, parts)))
    return str(_checked("".join(parts)))


def _check_nothing(*_: Any, **__: Any) -> None:
    pass


def _check_nested(value: Any = None, *_: Any, **__: Any) -> None:
    _measured(value)


# These are called with the arguments of Jinja's filters, so they carry their names.
def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_length(len(str(s)) + (str(s).count(str(old)) + 1) * len(str(new)))


def _check_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    _measured(value)
    sizes = [max(_length(part), 20) for part in value] if isinstance(value, (list, tuple, dict)) else []
    _check_length(sum(sizes) + len(sizes) * len(str(d)))


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    if _length(width) > 64 or (isinstance(width, int) and width > 64):
        raise TemplateRuntimeError("an indent above 64 is not allowed")
    _check_length(len(str(s)) + 64 * str(s).count("\n"))


def _check_format(pattern: Any) -> None:
    if _WIDE_FORMAT.search(str(pattern)):
        raise TemplateRuntimeError("a format with such a width is not allowed")


class _BudgetTransformer(NodeTransformer):
    """Puts checks where the sandbox does not look: loops, `~`, slices, and comparisons of nested things."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_measured")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_measured") for part in node.nodes]
        return _filtered(node, "_checked")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_checked") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr | nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_concat)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        transformed: nodes.Template = _BudgetTransformer().visit(tree)
        return transformed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes)) and attr in _UNBOUNDED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        _spend()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            _check_replace(owner, *args)
        if isinstance(owner, str) and name == "join" and args:
            _check_join(args[0], owner)
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _spend()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                _check_length(_length(one) * other if isinstance(other, int) else 0)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= _MAX_EXPONENT):
            raise TemplateRuntimeError(f"an exponent above {_MAX_EXPONENT} is not allowed")
        return _checked(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body, unmarked."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML, which no model was trained on.
    width = min(indent, 16) if indent is not None else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)


def _bounded(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter that first checks its arguments and then its result; keeps Jinja's mark of what it wants passed."""
    skipped = 1 if hasattr(original, "jinja_pass_arg") else 0

    def bounded(*args: Any, **kwargs: Any) -> Any:
        check(*args[skipped:], **kwargs)
        return _checked(original(*args, **kwargs))

    bounded.__dict__.update(getattr(original, "__dict__", {}))
    return bounded


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        cache_size=0,
        finalize=_measured,
    )
    checks: dict[str, Callable[..., None]] = {
        "replace": _check_replace,
        "join": _check_join,
        "indent": _check_indent,
        "format": lambda value, *_, **__: _check_format(value),
    }
    checks |= dict.fromkeys(("string", "pprint", "trim", "escape", "e", "unique", "sort", "min", "max"), _check_nested)
    filters = {name: _bounded(environment.filters[name], checks.get(name, _check_nothing)) for name in _FILTERS}
    filters["tojson"] = _bounded(_tojson, _check_nested)
    environment.filters = filters | {"_counted": _counted, "_checked": _checked, "_measured": _measured}
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


ENVIRONMENT = _make_environment()
