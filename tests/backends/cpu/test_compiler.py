"""The cache of compiled kernels: a hit compiles nothing, and a damaged file is never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_calls import call_kernel

from twinphase.backends.cpu import compiler
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.backends.cpu.compiler import KernelCompileError, compile_kernels, load_kernels
from twinphase.backends.cpu.isa import ISAS, available_isas, choose_isa
from twinphase.errors import InvalidRequestError, StorageError

ISA = choose_isa(None)
SPECS = ("quantize", "silu_mul:f32")  # small, so that they compile fast


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Object files by name, as compiled into an empty folder that does not exist yet."""
    folder, seen = tmp_path_factory.mktemp("cache") / "new" / "kernels", []
    compile_kernels(folder, ISA, SPECS, lambda done, total, name: seen.append((done, total, name)))
    assert seen[0][:2] == (0, 2) and seen[-1] == (2, 2, "")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(compiled: dict[str, bytes], tmp_path: Path) -> Path:
    """A folder of sound object files."""
    for name, content in compiled.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a compiling process is an error."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(compiler.subprocess, "Popen", refuse)


def test_nothing_but_the_objects_is_left_behind(compiled: dict[str, bytes]) -> None:
    assert len(compiled) == len(SPECS)
    assert all(name.endswith(".o") for name in compiled)


@pytest.mark.usefixtures("no_compiler")
def test_the_second_call_compiles_nothing(folder: Path) -> None:
    compile_kernels(folder, ISA, SPECS)
    addresses, engine = load_kernels(folder, ISA, SPECS)
    assert set(addresses) == set(SPECS) and all(addresses.values()) and engine is not None


def test_each_path_has_its_own_objects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Compiled:
        returncode = 0

        def __init__(self, command: list[str], **options: object) -> None:
            started.append(command)

        def poll(self) -> int:
            return 0

        def kill(self) -> None:
            pass

    monkeypatch.setattr(compiler.subprocess, "Popen", Compiled)
    others = [isa for isa in ISAS.values() if isa != ISA]
    for isa in others:
        compile_kernels(folder, isa, ["quantize"])
    assert [command[-2:] for command in started] == [[isa.name, "quantize"] for isa in others]


@pytest.mark.parametrize("damage", ("empty", "truncated", "flipped", "text"))
def test_a_damaged_object_is_compiled_again(folder: Path, compiled: dict[str, bytes], damage: str) -> None:
    name = next(name for name in compiled if name.startswith("quantize"))
    content = compiled[name]
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {"empty": b"", "truncated": content[:middle], "flipped": flipped, "text": b"not an object"}[damage]
    (folder / name).write_bytes(damaged)
    compile_kernels(folder, ISA, SPECS)
    assert (folder / name).read_bytes() != damaged
    addresses, engine = load_kernels(folder, ISA, SPECS)
    call_kernel(addresses["quantize"], [0] * 8, 0)
    del engine


def test_loading_a_damaged_object_is_an_error(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(KernelCompileError, match="quantize"):
        load_kernels(folder, ISA, SPECS)


@pytest.mark.parametrize("what", ("a file where the folder goes", "a file above it"))
def test_a_folder_that_cannot_be_made(tmp_path: Path, what: str) -> None:
    # Not by rights: these tests may run as root, whom nothing stops.
    blocked = tmp_path / "kernels"
    blocked.write_bytes(b"")
    with pytest.raises(StorageError, match="kernels"):
        compile_kernels(blocked if what.startswith("a file where") else blocked / "below", ISA, SPECS)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, which even root cannot write to")
def test_a_read_only_file_system() -> None:
    with pytest.raises(StorageError):
        compile_kernels(Path("/proc/twinphase"), ISA, SPECS)


def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match="Q3_X"):
        compile_kernels(tmp_path, ISA, ["pack:Q3_X"])


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        CpuBackend(isa="sse9")
    assert "sse9" in caught.value.cause
    assert all(name in caught.value.fix for name in available_isas())
