"""The Jinja environment of chat templates: immutable, with Hugging Face's helpers and a budget.

Jinja's sandbox protects Python's internals and limits single ranges. It does not stop nested loops,
or gigabytes of output from a few characters. Here every operation is charged, in steps, for the
data that it reads and creates, and operations that multiply are checked first. Steps are counted,
not timed, so that a busy machine does not refuse a template.
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
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser

# Limit per rendering on loop iterations, calls, operations, and created characters.
_MAX_STEPS = 1_000_000
_CHARACTERS_PER_STEP = 64
# A call of a function or macro takes this many times longer than an operation.
_STEPS_PER_CALL = 10
_MAX_INTEGER_BITS = 100_000
# Maximum characters or elements of any value that a template creates, unless its input is longer.
_MAX_LENGTH = 4_000_000
_MAX_EXPONENT = 64
# A number of four digits, or a width from an argument, in a format string, which allows unlimited
# padding.
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")
_UNBOUNDED_METHODS = frozenset(
    {"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map"}
)
# Filters that templates use and whose output is no longer than their input, unless limited below.
_FILTERS = frozenset(
    {
        "abs",
        "attr",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "format",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "pprint",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "striptags",
        "sum",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "wordcount",
    }
)
_COMPARING_TESTS = frozenset(
    {
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        "in",
    }
)
# Filters and tests that read all nested values of their arguments.
_READ_DEEPLY = _COMPARING_TESTS | {
    "e",
    "escape",
    "format",
    "groupby",
    "join",
    "max",
    "min",
    "pprint",
    "sort",
    "string",
    "sum",
    "tojson",
    "trim",
    "unique",
}

_budget: ContextVar[tuple[list[int], int]] = ContextVar("budget")


@contextmanager
def budget(input_length: int) -> Iterator[int]:
    """Give a rendering a new budget; yield the maximum characters of any value that it creates.

    Args:
        input_length: characters of the messages, which may exceed the limit for created values.
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


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _touched(value: Any) -> Any:
    """Charge for a value that is read or created, without nested values, and return it."""
    length = _length(value)
    _check_length(length)
    _spend(1 + length // _CHARACTERS_PER_STEP)
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise TemplateRuntimeError("it makes a number that is too large")
    return value


def _read(value: Any) -> Any:
    """Charge for a value with all nested values before it is written, compared or sorted."""
    total = 0
    inner = [value]
    while inner:
        part = inner.pop()
        length = _length(part)
        total += 2 + length
        _spend(1 + length // _CHARACTERS_PER_STEP)
        if isinstance(part, (list, tuple)):
            inner.extend(part)
        elif isinstance(part, dict):
            inner.extend((*part.keys(), *part.values()))
        elif isinstance(part, Namespace):
            inner.extend(part._Namespace__attrs.values())
    _check_length(total)
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend()
        yield value


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_length(sum(map(len, parts)))
    return str(_touched("".join(parts)))


# The parameters have the names of Jinja's filters' parameters.
def _check_replace(s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_length(len(str(s)) + (str(s).count(str(old)) + 1) * len(str(new)))


def _check_join(value: Any, d: Any = "", attribute: Any = None) -> None:
    sizes = [max(_length(part), 20) for part in value]
    _check_length(sum(sizes) + len(sizes) * len(str(d)))


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    if _length(width) > 64 or (isinstance(width, int) and width > 64):
        raise TemplateRuntimeError("an indent above 64 is not allowed")
    _check_length(len(str(s)) + 64 * str(s).count("\n"))


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    pattern = str(value)
    if _WIDE_FORMAT.search(pattern):
        raise TemplateRuntimeError("a format with such a width is not allowed")
    longest = max((len(str(_read(given))) for given in (*args, *kwargs.values())), default=0)
    _check_length(len(pattern) + (pattern.count("%") + pattern.count("{")) * longest)


def _pay_by_character(s: Any, *_: Any, **__: Any) -> None:
    """Charge per character, for filters that search a text with regular expressions."""
    _spend(len(str(s)))


class _BudgetTransformer(NodeTransformer):
    """Charges operations that the sandbox does not intercept, such as loops and literals."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_read")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_touched")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_read") for part in node.nodes]
        return _filtered(node, "_touched")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_touched")
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filtered(node.arg, "_read")
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_read")

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_read") if node.ctx == "load" else node


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

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, *args, **kwargs)
            assert wrapped is not None
            return wrapped(*args, **kwargs)

        return None if wrapped is None else bounded

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        _spend(_STEPS_PER_CALL)
        owner = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        whole = obj in (dict, Namespace) or isinstance(owner, (list, tuple, dict))
        for given in (owner, *args, *kwargs.values()):
            (_read if whole else _touched)(given)
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            _check_replace(owner, *args)
        if isinstance(owner, str) and name == "join" and args:
            args = (list(args[0]), *args[1:])
            _check_join(args[0], owner)
        return _touched(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _touched(left), _touched(right)
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                _check_length(_length(value) * count if isinstance(count, int) else 0)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        if operator == "**" and not (
            isinstance(right, (int, float)) and abs(right) <= _MAX_EXPONENT
        ):
            raise TemplateRuntimeError(f"an exponent above {_MAX_EXPONENT} is not allowed")
        return _touched(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is unmarked."""

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
    # Jinja itself escapes for HTML, which models were not trained on.
    width = min(indent, 16) if indent is not None else None
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys
    )


def _paying(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that is charged for its input and output, with Jinja's own attributes."""
    skipped = 1 if hasattr(original, "jinja_pass_arg") else 0
    pay = _read if name in _READ_DEEPLY else _touched
    check = _CHECKS.get(name)

    def paying(*args: Any, **kwargs: Any) -> Any:
        if name == "join":  # The parts may come from a generator.
            args = (*args[:skipped], list(_counted(args[skipped])), *args[skipped + 1 :])
        for given in (*args[skipped:], *kwargs.values()):
            pay(given)
        if check is not None:
            check(*args[skipped:], **kwargs)
        return _touched(original(*args, **kwargs))

    paying.__dict__.update(getattr(original, "__dict__", {}))
    return paying


_CHECKS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_indent,
    "format": _check_format,
    **dict.fromkeys(("striptags", "title", "wordcount"), _pay_by_character),
}


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        cache_size=0,
        finalize=_read,
    )
    originals: dict[str, Callable[..., Any]] = {**environment.filters, "tojson": _tojson}
    environment.filters = {name: _paying(name, originals[name]) for name in _FILTERS}
    environment.filters |= {"_counted": _counted, "_touched": _touched, "_read": _read}
    tests: dict[str, Any] = environment.tests
    tests |= {name: _paying(name, tests[name]) for name in _COMPARING_TESTS}
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


ENVIRONMENT = _make_environment()
