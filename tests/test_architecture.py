"""The rules of docs/architecture.md, read from the source: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "twinphase"
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

WORDS = {
    "request",
    "constraint",
    "outcome",
    "batch",
    "blueprint",
    "config",
    "errors",
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
    "models": {"backends.base", "weights"},
    "scheduler": {"cache"},
    "sampling": {"backends.base"},
    "speculation": {"cache", "weights", "scheduler", "sampling", "phases.cost"},
    "phases": {"cache", "weights", "models", "backends.base"},
    # Takes values and reads no files: what `run --json` or a server wrote is read by
    # `commands/explain_saved.py`, a load's result.json by `twinphase/explain/loads.py`, and
    # `commands/explain_source.py` chooses between them.
    "explain": {"phases", "backends.base"},
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
    "server": {"engine", "phases", "explain", "tokenizer", "terminal"},
}
TOP = {
    "__init__",
    "__main__",
    "cli",
    "commands",
    "arguments",
    "answer",
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
    "uvicorn": "server",
    "prometheus_client": "server",
    "transformers": (),  # measured beside us by twinphase_bench, never used by us
    "llama_cpp": (),
    "scipy": (),
    "vl_convert": (),
    "opentelemetry": "server",
}


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Absolute dotted names that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
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


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_own_folder_or_lower_layers(path):
    for name, node in imports(path):
        if name.startswith("twinphase."):
            target = name.removeprefix("twinphase.")
            assert allowed(path, target), f"{path}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_third_party_packages_stay_in_their_folder(path):
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


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= 500, f"{path} has {text.count(chr(10))} lines"
    limit = 180 if "/kernels/" in path.as_posix() else 80
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # The signature of a command is the list of its options, however many there are.
            command = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
            command |= node.name == path.stem and layer(path) == "commands"
            length = (node.end_lineno or 0) - (node.body[0].lineno if command else node.lineno) + 1
            assert length <= limit, f"{path}:{node.lineno} {node.name} has {length} lines"
