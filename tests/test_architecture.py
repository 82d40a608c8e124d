"""The rules of docs/architecture.md, read from the source: imports, lengths, and calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import twinphase

SOURCE = Path(__file__).parents[1] / "src"
ROOT = SOURCE / "twinphase"
BENCH = SOURCE / "twinphase_bench"
FILES = sorted(ROOT.rglob("*.py"))
BENCH_FILES = sorted(BENCH.rglob("*.py"))
ALL_FILES = FILES + BENCH_FILES

WORDS = {
    "request",
    "constraint",
    "outcome",
    "batch",
    "blueprint",
    "config",
    "errors",
    "installed",
    "lifeline",
    "load_times",
    "numa",
    "settings",
    "speculative",
}
# What a folder may import from twinphase, beside itself and the words of L0; a dotted name narrows
# to one module.
MAY_IMPORT = {
    "cache": set(),
    "weights": set(),
    "tokenizer": {"weights.checkpoint", "weights.storage"},  # a GGUF file carries its tokenizer
    "backends": {"weights"},
    "models": {"backends.base", "backends.encoder_protocol", "weights"},
    "scheduler": {"cache"},
    "sampling": {"backends.base"},
    "speculation": {"cache", "weights", "scheduler", "sampling", "phases.cost"},
    "phases": {"cache", "weights", "models", "backends.base"},
    # Takes values and reads no files: what `run --json` or a server wrote is read by
    # `commands/explain_saved.py`, and `commands/explain_source.py` chooses what reads a file.
    "explain": {"phases", "backends.base"},
    "workload": set(),
    "estimate": {"phases", "weights", "backends.base", "models"},
    "engine": {
        "cache",
        "weights",
        "tokenizer",
        "backends",
        "models",
        "scheduler",
        "sampling",
        "speculation",
        "phases",
        "explain",
    },
    "cluster": {"engine", "scheduler", "cache", "phases", "server"},
    "simulate": {
        "backends.device",
        "cache",
        "cluster",
        "engine",
        "estimate",
        "models",
        "phases",
        "scheduler",
        "server",
        "speculation",
        "weights",
        "workload",
    },
    "server": {
        "engine",
        "phases",
        "explain",
        "sampling.json_schema",  # whether a call fits its tool
        "tokenizer",
        "terminal",
        "weights.catalogue",
        "weights.storage",
    },
}
TOP = {
    "__init__",
    "__main__",
    "cli",
    "commands",
    "arguments",
    "answer",
    "chat",
    "terminal",
    "progress",
}  # command line, public names: all of the above
THIRD_PARTY_HOME = {
    "numba": "backends/cpu",
    "llvmlite": "backends/cpu",
    "torch": "backends/torch",
    "triton": "backends/torch/kernels",
    "ray": "cluster",
    "llguidance": "sampling",
    "fastapi": "server",
    "fastapi_offline": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
    # Only the workbench uses these, and imports them by `extras.require`.
    "transformers": (),
    "llama_cpp": (),
    "scipy": (),
    "altair": (),
    "vl_convert": (),
    "opentelemetry": "server",
    "prompt_toolkit": "chat",
    "wcwidth": "chat",
}


KNOWN_CIRCLES: set[str] = set()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file; its module is the first."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def trees_go_with_these_tests() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Absolute dotted names that a file imports, at its top or inside functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "twinphase":
                yield from ((f"twinphase.{alias.name}", node) for alias in node.names)
            else:
                yield node.module or "", node


def layer(path: Path) -> str:
    """The folder of a file, or its own name at the top."""
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def allowed(path: Path, target: str) -> bool:
    """Whether the file may import `target`, a dotted name below twinphase."""
    own = layer(path)
    folder = target.split(".")[0]
    if own in TOP or folder == own or target == "__version__":
        return True
    if own in WORDS:
        return folder in WORDS
    return folder in WORDS or any(
        target == name or target.startswith(name + ".") for name in MAY_IMPORT[own]
    )


def test_imports_own_folder_or_lower_layers():
    for path in FILES:
        for name, node in imports(path):
            if name.startswith("twinphase."):
                target = name.removeprefix("twinphase.")
                assert allowed(path, target), f"{path}:{node.lineno} imports {name}"


def test_third_party_packages_stay_in_their_folder():
    for path in FILES:
        relative = path.relative_to(ROOT).as_posix()
        for name, node in imports(path):
            package = name.split(".")[0]
            home = THIRD_PARTY_HOME.get(package)
            assert home is None or relative.startswith(home), f"{path}:{node.lineno} imports {name}"
            if layer(path) == "models":
                assert package not in ("numpy", "torch"), (
                    f"{path}:{node.lineno}: models import no array library"
                )
            if layer(path) in ("cache", "scheduler") or layer(path) in WORDS:
                assert package != "numpy", (
                    f"{path}:{node.lineno}: bookkeeping holds integers, not arrays"
                )


def modules_imported(path: Path) -> set[str]:
    """Modules of both packages that a file imports when it is imported itself."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found.update(inner & MODULES.keys() or {node.module})
            elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
                visit(node.body)

    visit(nodes_of(path)[0].body)
    return found & MODULES.keys()


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in ALL_FILES}


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: modules_imported(path) - {name} for name, path in MODULES.items()}
    while leaves := [name for name, used in graph.items() if not used & graph.keys()]:
        for name in leaves:
            del graph[name]
    # What is left imports a circle, or lies on one.
    circles = {name for name in graph if name in reachable(graph, name)}
    assert circles <= KNOWN_CIRCLES


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = (graph[waiting.pop()] & graph.keys()) - found
        found |= new
        waiting += new
    return found


def test_the_house_does_not_know_the_workbench():
    for path in FILES:
        assert "twinphase_bench" not in path.read_text(), path


def test_the_workbench_imports_the_public_api_and_the_phases():
    for path in BENCH_FILES:
        public = {f"twinphase.{name}" for name in twinphase.__all__}
        for name, node in imports(path):
            if name.partition(".")[0] == "twinphase":
                allowed = name in public or name.startswith("twinphase.phases")
                assert allowed, f"{path}:{node.lineno} imports {name}"
            assert name.partition(".")[0] not in THIRD_PARTY_HOME, f"{path}:{node.lineno}"


def test_files_and_functions_are_short():
    for path in ALL_FILES:
        text = path.read_text()
        assert text.count("\n") <= 500, f"{path} has {text.count(chr(10))} lines"
        limit = 180 if "/kernels/" in path.as_posix() else 80
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # The signature of a command is the list of its options, however many there are.
                command = any(
                    "command" in ast.unparse(decorator) for decorator in node.decorator_list
                )
                command |= node.name == path.stem and path.parent.name == "commands"
                length = (
                    (node.end_lineno or 0) - (node.body[0].lineno if command else node.lineno) + 1
                )
                assert length <= limit, f"{path}:{node.lineno} {node.name} has {length} lines"
