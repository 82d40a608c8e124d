"""The cache of compiled kernels: a hit compiles nothing, and a damaged file is never run."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from kernel_calls import call_kernel

from twinphase.backends.cpu import compiler
from twinphase.backends.cpu.compiler import KernelCompileError, compile_kernels, load_kernels
from twinphase.backends.cpu.isa import ISAS, choose_isa
from twinphase.errors import StorageError

ISA = choose_isa(None)
SPECS = ("quantize", "gate_mul:silu:f32")  # small, so that they compile fast


@pytest.fixture(scope="module", autouse=True)
def no_bundle():
    """A checkout may have bundles of compiled kernels, which a release has made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_usable_bundle", lambda isa: None)
        yield


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, bytes]:
    """Object files by name, as compiled into an empty folder that does not exist yet."""
    folder = tmp_path_factory.mktemp("cache") / "new" / "kernels"
    seen = []
    compile_kernels(folder, ISA, SPECS, lambda done, total, name: seen.append((done, total, name)))
    assert seen[0][:2] == (0, 2) and seen[-1] == (2, 2, "")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(compiled, tmp_path) -> Path:
    """A folder of valid object files."""
    for name, content in compiled.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Path and kernel of each compile process that would have been started; none is started."""
    commands: list[list[str]] = []

    def start(command: list[str], **options: object) -> Mock:
        commands.append(command[-2:])
        return Mock(returncode=0)

    monkeypatch.setattr(compiler.lifeline, "start", start)
    return commands


def test_nothing_but_the_objects_is_left_behind(compiled):
    assert len(compiled) == len(SPECS)
    assert all(name.endswith(".o") for name in compiled)


def test_the_second_call_compiles_nothing(folder, started):
    compile_kernels(folder, ISA, SPECS)
    assert not started
    addresses = load_kernels(folder, ISA, SPECS)
    assert set(addresses) == set(SPECS) and all(addresses.values())


def test_each_path_has_its_own_objects(folder, started):
    others = [isa for isa in ISAS.values() if isa != ISA]
    for isa in others:
        compile_kernels(folder, isa, ["quantize"])
    assert started == [[isa.name, "quantize"] for isa in others]


@pytest.mark.parametrize(
    "damage",
    (
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:400] + bytes([content[400] ^ 1]) + content[401:],
        lambda content: b"not an object",
    ),
    ids=("empty", "a byte short", "half", "flipped", "text"),
)
def test_a_damaged_object_is_not_run_but_compiled_anew(folder, started, damage):
    (path,) = folder.glob("quantize*")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(KernelCompileError, match="quantize"):
        load_kernels(folder, ISA, SPECS)
    compile_kernels(folder, ISA, SPECS)
    assert started == [[ISA.name, "quantize"]] and not path.exists()


@pytest.mark.slow
def test_an_object_that_was_damaged_runs_again(folder):
    (path,) = folder.glob("quantize*")
    path.write_bytes(path.read_bytes()[:-1])
    compile_kernels(folder, ISA, SPECS)
    addresses = load_kernels(folder, ISA, SPECS)
    call_kernel(addresses["quantize"], [0] * 8, 0)


@pytest.mark.parametrize("below", ("kernels", "kernels/below", "/proc/twinphase"))
def test_a_folder_that_cannot_be_made(tmp_path, below):
    # A file is in the way, or the file system is read-only: these tests may run as root, whom no
    # rights stop.
    if below.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    (tmp_path / "kernels").write_bytes(b"")
    with pytest.raises(StorageError, match=Path(below).parts[-1]):
        compile_kernels(tmp_path / below, ISA, SPECS)


def test_a_kernel_that_does_not_compile(tmp_path):
    with pytest.raises(KernelCompileError, match="Q3_X"):
        compile_kernels(tmp_path, ISA, ["pack:Q3_X"])


def test_processes_that_start_together_compile_a_kernel_once(compiled, tmp_path, started):
    """The second one waits, and finds what the first one compiled."""

    def compile_all() -> None:
        compile_kernels(tmp_path, ISA, SPECS)

    with compiler._locked(tmp_path):
        second = threading.Thread(target=compile_all)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        for name, content in compiled.items():
            (tmp_path / name).write_bytes(content)
    second.join(60)
    assert not second.is_alive() and not started
