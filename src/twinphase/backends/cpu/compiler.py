"""Compiles kernels to object files, by Numba in a process of its own, and loads them by LLVM.

A kernel is named by a spec such as `quantized_linear:Q4_0`, the name of a factory in KERNELS and
its parameters. Object files are keyed by everything that could change them (kernel sources,
versions, processor, spec): a cache can only miss. Loading needs neither Numba nor compilation,
which keeps a warm start short and its memory small.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from twinphase import lifeline
from twinphase.backends.cpu.compile_estimate import CompileEstimate, shared_out
from twinphase.backends.cpu.isa import ISAS, Isa, baseline_cpu, compiler_environment
from twinphase.backends.cpu.prebuilt import Bundle, read_bundle
from twinphase.config import module_command
from twinphase.errors import TwinphaseError
from twinphase.load_times import loading_part
from twinphase.weights import block_formats
from twinphase.weights.storage import storage_error, write_atomically

# The module under `kernels` that makes each kernel, by a function of the kernel's name.
KERNELS = {
    kernel: module
    for module, kernels in {
        "attention": ("attention_prefill", "attention_decode", "attention_merge"),
        "delta": ("delta_gates", "gated_norm", "gate_heads"),
        "elementwise": (
            "rms_norm",
            "gate_mul",
            "add",
            "add_norm",
            "add_gated",
            "cap_logits",
            "pick_rows",
        ),
        "embedding": ("embed",),
        "gate_tile": ("gate_tile",),
        "linear": ("quantized_linear", "dense_linear", "quantized_experts", "dense_experts"),
        "packing": ("pack", "pack_tiles"),
        "program": ("run_program",),
        "quantize": ("quantize", "round_rows"),
        "ranks": ("copy_columns", "meet", "stamp"),
        "recurrence": ("multiply", "causal_conv", "keep_history"),
        "rope": ("rope_kv_write", "norm_columns"),
        "sampling": ("sample_rows",),
        "scan": ("delta_scan", "space_scan"),
        "space": ("space_gates", "gate_norm"),
        "routing": ("route", "route_sigmoid", "sort_rows", "combine"),
    }.items()
    for kernel in kernels
}

# A compiling process that cannot write exits with this code plus the errno.
WRITE_FAILED_EXIT = 100
Progress = Callable[[float, int, str], None]
# done, total, what: kernels, those done by the share of the time that is behind


class KernelCompileError(TwinphaseError):
    """A kernel did not compile; the message carries the compiler's last line."""


@functools.cache
def sources_digest() -> str:
    """SHA-256 over the sources of all kernels, in hexadecimal digits."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    sources = ("emit", "intrinsics", "formats", "isa", "kv_layout", "program_layout", "tiling")
    paths = [*folder.glob("kernels/*.py"), *(folder / f"{name}.py" for name in sources)]
    for path in [*sorted(paths), Path(block_formats.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def compiler_versions() -> dict[str, str]:
    """Installed versions of what compiles kernels, by package."""
    return {name: importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")}


@functools.cache
def _usable_bundle(isa: Isa) -> Bundle | None:
    """The bundle of a path, if it was made from these sources for the processor of the path."""
    bundle = read_bundle(isa.name)
    if bundle and (bundle.sources, bundle.cpu) == (sources_digest(), baseline_cpu(isa)):
        return bundle
    return None


@functools.cache
def kernel_digest(isa: Isa) -> str:
    """A digest of everything that decides which bits the kernels of a path compute."""
    bundle = _usable_bundle(isa)
    versions = (compiler_versions(), bundle and bundle.versions)
    return hashlib.sha256(f"{sources_digest()}|{versions}".encode()).hexdigest()


@functools.cache
def _base_key(isa: Isa) -> str:
    import llvmlite.binding as llvm

    features = "" if isa.cpu else llvm.get_host_cpu_features().flatten()
    path = f"{isa}|{baseline_cpu(isa)}|{features}|{sys.version_info[:2]}"
    return f"{kernel_digest(isa)}|{path}"


def object_path(folder: Path, isa: Isa, spec: str) -> Path:
    """The file that a kernel's object code has in `folder`."""
    key = hashlib.sha256(f"{_base_key(isa)}|{spec}".encode()).hexdigest()[:24]
    return folder / f"{spec.replace(':', '-')}-{isa.name}-{key}.o"


def _read_object(path: Path) -> tuple[str, bytes] | None:
    """Symbol and object code of a file, None when it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest = content[:32]
    symbol = content[32:288]
    code = content[288:]
    if hashlib.sha256(symbol + code).digest() != digest:
        return None
    return symbol.rstrip(b"\0").decode(), code


def compile_kernels(
    folder: Path, isa: Isa, specs: Sequence[str], progress: Progress | None = None
) -> None:
    """Make sure that `folder` has a sound object file per spec.

    What is missing is copied from the bundle that the wheel brought, or compiled.

    Raises:
        KernelCompileError: the compiler failed.
        StorageError: the folder cannot be written.
    """
    missing = _missing(folder, isa, specs)
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, folder) from error
    with loading_part("compile"), _locked(folder):
        # Another process may have compiled them while this one waited for the lock.
        missing = _missing(folder, isa, missing)
        with loading_part("unpack"):
            missing = _copy_prebuilt(folder, isa, missing)
        if missing:
            _compile_in_processes(folder, isa, missing, progress)


def _missing(folder: Path, isa: Isa, specs: Sequence[str]) -> list[str]:
    return [spec for spec in specs if _read_object(object_path(folder, isa, spec)) is None]


def _copy_prebuilt(folder: Path, isa: Isa, specs: Sequence[str]) -> list[str]:
    """Copy what the path's bundle has into `folder`; return the specs that it lacks."""
    bundle = _usable_bundle(isa)
    objects = bundle.objects if bundle else {}
    try:
        for spec in objects.keys() & set(specs):
            write_atomically(object_path(folder, isa, spec), objects[spec])
    except OSError as error:
        raise storage_error(error, folder) from error
    return [spec for spec in specs if spec not in objects]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: engines that start together would compile the same kernels."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # A file system without locks costs work that is done twice, and nothing else.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile_in_processes(
    folder: Path, isa: Isa, missing: Sequence[str], progress: Progress | None
) -> None:
    try:
        for spec in missing:
            object_path(folder, isa, spec).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, folder) from error
    command = [*module_command("twinphase.backends.cpu.compiler"), str(folder), isa.name]
    environment = compiler_environment(isa)
    shares = shared_out(isa.name, missing, os.cpu_count() or 1)
    watch = _Watch(folder, isa, CompileEstimate(isa.name, shares), missing, progress)
    with contextlib.ExitStack() as stack:
        workers = []
        for share in shares:
            log = stack.enter_context(tempfile.TemporaryFile())
            process = lifeline.start(
                [*command, *share],
                stdout=log,
                stderr=log,
                env=environment,
            )
            stack.callback(process.kill)
            workers.append((process, log))
        while any(process.poll() is None for process, _ in workers):
            watch.report()
            time.sleep(0.05)
        watch.report()
        for process, log in workers:
            if process.returncode:
                log.seek(0)
                _raise_failure(process.returncode, log.read().decode(errors="replace"), folder, isa)


def _raise_failure(returncode: int, log: str, folder: Path, isa: Isa) -> NoReturn:
    """Raise what ended a compiling process; a failed write left its errno in the exit code."""
    if returncode > WRITE_FAILED_EXIT:
        number = returncode - WRITE_FAILED_EXIT
        raise storage_error(OSError(number, os.strerror(number)), folder)
    last = (log.strip().splitlines() or [f"exit code {returncode}"])[-1]
    raise KernelCompileError(
        f"Compiling kernels failed: {last}", f"Try another path than --isa {isa.name}."
    )


class _Watch:
    """Reports how far the compiling processes are, by the object files that are there."""

    def __init__(
        self,
        folder: Path,
        isa: Isa,
        estimate: CompileEstimate,
        specs: Sequence[str],
        progress: Progress | None,
    ) -> None:
        self._paths = {spec: object_path(folder, isa, spec) for spec in specs}
        self._estimate = estimate
        self._progress = progress
        self._start = time.perf_counter()

    def report(self) -> None:
        if self._progress is not None:
            done = {spec for spec, path in self._paths.items() if path.exists()}
            left = [spec for spec in self._paths if spec not in done]
            work = self._estimate.work_done(time.perf_counter() - self._start, done)
            self._progress(work, len(self._paths), left[0] if left else "")


def _compile(folder: Path, isa: Isa, specs: Iterable[str]) -> None:
    """The compiling process: one object file per spec, written whole or not at all."""
    import llvmlite.binding as llvm

    _inline_without_copies()
    for option in isa.llvm_options:
        llvm.set_option("twinphase", option)
    # Garbage collection takes a fifteenth of the time; a kernel leaves about 10 MB of garbage.
    gc.disable()
    for number, spec in enumerate(specs):
        if number % 16 == 15:
            gc.collect()
        name, code = _object_code(isa, spec)
        symbol = name.encode().ljust(256, b"\0")
        try:
            write_atomically(
                object_path(folder, isa, spec),
                hashlib.sha256(symbol + code).digest() + symbol + code,
            )
        except OSError as error:
            sys.exit(WRITE_FAILED_EXIT + (error.errno or 0))


def _inline_without_copies() -> None:
    """Let Numba inline a function as it is.

    Numba copies it block by block, and with each block all its variables, which took about 15 % of
    a linear layer's compilation. The copies are not needed: Numba builds the function's code again
    for each call that it inlines, so what inlining changes is seen by that call only.
    """
    from numba.core import inline_closurecall

    inline_closurecall.copy = SimpleNamespace(deepcopy=lambda block: block)


def _object_code(isa: Isa, spec: str) -> tuple[str, bytes]:
    """A kernel's symbol and its object code, which exports that symbol only.

    `numba.njit` would generate machine code twice, once to be called from Python, which never
    happens here, and wrap the function for callers in C. Numba's own compiler can be asked for
    neither.
    """
    from numba.core.compiler import Flags, compile_extra
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    name, *parameters = spec.split(":")
    module = importlib.import_module(f"twinphase.backends.cpu.kernels.{KERNELS[name]}")
    signature, function = getattr(module, name)(isa, *parameters)
    # The name becomes the symbol; objects are loaded side by side.
    function.__name__ = function.__qualname__ = re.sub(r"\W", "_", spec)
    flags = Flags()
    flags.error_model = "numpy"
    flags.release_gil = flags.nrt = True
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    context = cpu_target.target_context
    cpu_target.typing_context.refresh()
    context.refresh()
    compiled = compile_extra(
        cpu_target.typing_context,
        context,
        function,
        signature.args,
        signature.return_type,
        flags,
        locals={},
    )
    library = compiled.library
    symbol = compiled.fndesc.llvm_func_name
    # Machine code is emitted once, below, after the library's functions are optimized together.
    library._finalize_final_module = lambda: setattr(library, "_finalized", True)
    with global_compiler_lock:
        library.finalize()
    # Helper functions of different kernels can have equal names (Numba numbers them per process)
    # and different bodies: the loader would use the first for all.
    for helper in library._final_module.functions:
        if not helper.is_declaration and helper.name != symbol:
            helper.linkage = "internal"
    return symbol, bytes(library._codegen._tm.emit_object(library._final_module))


class LoadedKernels(dict[str, int]):
    """Addresses of kernels by spec; it owns their memory.

    A kernel that was not loaded is compiled when it is asked for: steps other than the recorded
    one, such as those that keep hidden states, may run more kernels.
    """

    def __init__(self, folder: Path, isa: Isa) -> None:
        super().__init__()
        self._folder = folder
        self._isa = isa
        self._engines: list[object] = []

    def __missing__(self, spec: str) -> int:
        compile_kernels(self._folder, self._isa, [spec])
        self.load([spec])
        return self[spec]

    def load(self, specs: Sequence[str]) -> None:
        """Add kernels that are compiled."""
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        symbols = {}
        for spec in specs:
            found = _read_object(object_path(self._folder, self._isa, spec))
            if found is None:
                raise KernelCompileError(
                    f"Kernel {spec} is not compiled.", "Call compile_kernels first."
                )
            symbols[spec], code = found
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engines.append(engine)
        self |= {spec: engine.get_function_address(symbol) for spec, symbol in symbols.items()}


def load_kernels(folder: Path, isa: Isa, specs: Sequence[str]) -> LoadedKernels:
    """The compiled kernels of these specs.

    Raises:
        KernelCompileError: a kernel has not been compiled.
    """
    kernels = LoadedKernels(folder, isa)
    kernels.load(specs)
    return kernels


if __name__ == "__main__":
    # Numba would import these, where they are installed, for functions that no kernel calls.
    sys.modules |= dict.fromkeys(("scipy", "cffi"))  # type: ignore[arg-type]
    _compile(Path(sys.argv[1]), ISAS[sys.argv[2]], sys.argv[3:])
