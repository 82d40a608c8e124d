"""The rules of docs/style.md that a program can check: words, constants, lines, and sizes of rooms.

What a file may import, and how long its functions may be, is in test_architecture.py.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import token
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FILES = [
    *SOURCES,
    *(path for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("*.py")),
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

MAX_COLUMNS = 100
MAX_FILE_LINES = 500
MAX_POSITIONAL_ARGUMENTS = 6

# Words that docs/style.md replaces; its own page quotes them.
ODD_WORDS = re.compile(
    r"\b(whoever|whomever|nobody|anybody|everybody|so many|of which|in which|whatever|told|tells"
    r"|said|goes on|anew)\b",
    re.IGNORECASE,
)
QUOTES_ODD_WORDS = {"docs/style.md"}
CODE_IN_MARKDOWN = re.compile(r"```.*?```|`[^`]*`|^    .*$", re.DOTALL | re.MULTILINE)
CONSTANT = re.compile(r"\s*_?[A-Z][A-Z0-9_]*(: [^=]+)? = ")
# Packages whose names users import.
PUBLIC_PACKAGES = {"src/twinphase/__init__.py", "src/twinphase_bench/__init__.py"}

# The most tokens of code that a room may have: Python's tokens without comments, docstrings and
# line ends, so that packed lines win nothing. A larger number here is a decision.
BUDGET: dict[str, int] = {
    "benchmarks": 42_100,
    "tests": 390_800,
    "twinphase": 18_100,
    "twinphase/backends": 126_300,
    "twinphase/cache": 6_000,
    "twinphase/chat": 3_200,
    "twinphase/cluster": 30_000,
    "twinphase/commands": 17_800,
    "twinphase/engine": 40_600,
    "twinphase/estimate": 4_700,
    "twinphase/explain": 10_900,
    "twinphase/models": 23_200,
    "twinphase/phases": 12_200,
    "twinphase/sampling": 9_300,
    "twinphase/scheduler": 6_700,
    "twinphase/server": 68_700,
    "twinphase/simulate": 15_900,
    "twinphase/speculation": 13_900,
    "twinphase/tokenizer": 18_300,
    "twinphase/weights": 24_000,
    "twinphase/workload": 2_200,
    "twinphase_bench": 74_300,
}
MAX_TOKENS = {"src": 525_400, "tests": 390_800, "benchmarks": 42_100}

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Since Python 3.12 an f-string is several tokens; it counts as one.
FSTRING_START = getattr(token, "FSTRING_START", None)
FSTRING_END = getattr(token, "FSTRING_END", None)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def tokens_of(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))


@pytest.fixture(scope="module", autouse=True)
def sources_go_with_these_tests() -> Iterator[None]:
    """Free the trees and tokens, a million objects, after these tests; no garbage collection."""
    gc.disable()
    yield
    gc.enable()
    tree_of.cache_clear()
    tokens_of.cache_clear()


def docstring_lines(path: Path) -> set[int]:
    """Lines of all docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = set[int]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def count_tokens(path: Path) -> int:
    documented = docstring_lines(path)
    count = 0
    depth = 0
    for found in tokens_of(path):
        if found.type == FSTRING_END:
            depth -= 1
        elif depth == 0 and found.type not in SKIPPED:
            count += not (found.type == tokenize.STRING and found.start[0] in documented)
        depth += found.type == FSTRING_START
    return count


def room_of(path: Path) -> str:
    """Where tokens are counted: a folder of `src/twinphase`, or a whole other package."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "src":
        return parts[0]
    if parts[1] != "twinphase":
        return parts[1]
    return "/".join(parts[1:3]) if len(parts) > 3 else "twinphase"


def odd_words_of_sources() -> Iterator[str]:
    """Odd words in docstrings, comments and strings."""
    for path in SOURCES:
        for found in tokens_of(path):
            if found.type in (tokenize.COMMENT, tokenize.STRING):
                for word in ODD_WORDS.findall(found.string):
                    yield f"{name_of(path)}:{found.start[0]} {word}"


def odd_words_of_pages() -> Iterator[str]:
    """Odd words in prose; code and examples are left out."""
    for path in PAGES:
        if name_of(path) not in QUOTES_ODD_WORDS:
            prose = CODE_IN_MARKDOWN.sub("", path.read_text(encoding="utf-8"))
            for word in ODD_WORDS.findall(prose):
                yield f"{name_of(path)} {word}"


def constants_completed_by_a_comment() -> Iterator[str]:
    """A comment beside a constant is a sentence of its own, so it begins with a capital letter."""
    for path in SOURCES:
        for found in tokens_of(path):
            if found.type == tokenize.COMMENT and CONSTANT.match(found.line):
                words = found.string.lstrip("# ")
                if words[:1].islower() and not words.startswith(("noqa", "type:")):
                    yield f"{name_of(path)}:{found.start[0]} {found.line.strip()}"


def long_lines() -> Iterator[str]:
    for path in FILES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{name_of(path)}:{number} has {len(line)} columns"


def long_files() -> Iterator[str]:
    for path in FILES:
        count = path.read_text(encoding="utf-8").count("\n")
        if count > MAX_FILE_LINES:
            yield f"{name_of(path)} has {count} lines"


def paired_assignments() -> Iterator[str]:
    """`a, b = x, y`, unless it swaps."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and isinstance(node.targets[0], ast.Tuple)
            ):
                targets = {ast.unparse(element) for element in node.targets[0].elts}
                values = {ast.unparse(element) for element in node.value.elts}
                if targets != values:
                    yield f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"


def many_positional_arguments() -> Iterator[str]:
    """Calls outside kernels that name too few of their arguments."""
    for path in SOURCES:
        if "kernels" not in path.parts:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL_ARGUMENTS:
                    yield f"{name_of(path)}:{node.lineno} {ast.unparse(node)[:60]}"


def lists_of_public_names() -> Iterator[str]:
    for path in SOURCES:
        if name_of(path) not in PUBLIC_PACKAGES:
            for node in tree_of(path).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    yield f"{name_of(path)}:{node.lineno}"


# The most places that may break a rule; a rule that holds everywhere has 0.
RULES: list[tuple[Callable[[], Iterator[str]], int]] = [
    (odd_words_of_sources, 0),
    (odd_words_of_pages, 0),
    (constants_completed_by_a_comment, 0),
    (long_lines, 0),
    (long_files, 1),
    (paired_assignments, 0),
    (many_positional_arguments, 0),
    (lists_of_public_names, 0),
]


@pytest.mark.parametrize(("rule", "most"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_rules_of_style(rule, most):
    places = list(rule())
    assert len(places) <= most, "\n".join(places)


def test_rooms_keep_their_budgets_of_tokens():
    rooms = Counter[str]()
    for path in FILES:
        rooms[room_of(path)] += count_tokens(path)
    assert rooms.keys() == BUDGET.keys()
    assert all(rooms[room] <= budget for room, budget in BUDGET.items()), rooms
    in_src = sum(count for room, count in rooms.items() if room.startswith("twinphase"))
    sums = {"src": in_src, "tests": rooms["tests"], "benchmarks": rooms["benchmarks"]}
    assert all(sums[part] <= most for part, most in MAX_TOKENS.items()), sums
