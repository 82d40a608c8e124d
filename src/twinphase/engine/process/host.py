"""Runs an engine's loop in a thread, or at the other end of a link that reconnects.

A host carries messages, and reports that the engine has died. It does not interpret messages.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from twinphase.config import EngineConfig
from twinphase.engine.embedding.loop import make_loop
from twinphase.engine.frontends.checks import task_of
from twinphase.engine.frontends.exclusive_use import OwnProcess
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.process.messages import (
    EngineFacts,
    FromEngine,
    Load,
    Loading,
    Ping,
    Pong,
    Refused,
    Stop,
    ToEngine,
)
from twinphase.engine.process.start import how_it_ended, start_process
from twinphase.engine.process.status import WorkerStatus
from twinphase.engine.process.wire import SEND_BUFFER_BYTES, Decoder, encode
from twinphase.errors import EngineDeadError, TwinphaseError

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 30.0
# An engine that ran longer than this is restarted with the shortest delay again.
HEALTHY_UPTIME_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 10.0
PING_INTERVAL_SECONDS = 0.25

Receive = Callable[[FromEngine], None]
Died = Callable[[EngineDeadError], None]


class Host(Protocol):
    """Carries messages to an engine and back.

    Attributes:
        task: what the model does: "generate" text, "embed" texts, or "score" pairs of them.
        is_running: whether the engine takes messages.
        num_restarts: number of restarts so far.
        last_death: cause of the last restart.
        failure: reason for refusing the model at the first start; None if it was accepted.
        totals_last: whether totals in `StepStats` continue after a restart instead of restarting at
            0.
    """

    text: ModelText
    task: str

    @property
    def is_running(self) -> bool: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def last_death(self) -> EngineDeadError | None: ...

    @property
    def failure(self) -> Refused | None: ...

    @property
    def totals_last(self) -> bool: ...

    def start(self, receive: Receive, died: Died) -> None:
        """Start; any thread may call both functions, and `died` is called once per death."""

    def put(self, message: ToEngine) -> None:
        """Send a message.

        Raises:
            EngineDeadError: the engine takes no messages, or this is a forked child.
        """

    def kill(self) -> None:
        """Kill an engine that does not answer; it is restarted if that is possible."""

    def workers(self) -> list[WorkerStatus]:
        """The engines behind a router; empty for a host of one engine."""

    def close(self) -> None:
        """End the engine after its present step."""


class ThreadHost:
    """A loaded engine in a thread of this process; it ends with the process."""

    num_restarts = 0
    last_death: EngineDeadError | None = None
    failure: Refused | None = None
    totals_last = False

    def __init__(self, loaded: Any) -> None:
        """Start a `LoadedEngine` or `LoadedEmbedder`, which belongs to the thread from now on."""
        self.loaded = loaded
        self.text: ModelText = loaded.text
        self.task: str = loaded.task
        self.is_running = False
        self.error: BaseException | None = None
        self._process = OwnProcess()
        self._thread = threading.Thread(target=self._run, name="twinphase-engine", daemon=True)

    def start(self, receive: Receive, died: Died) -> None:
        self._died = died
        self._loop, facts = make_loop(self.loaded, receive)
        self.is_running = True
        receive(facts)
        self._thread.start()

    def put(self, message: ToEngine) -> None:
        self._process.check()
        if not self.is_running:
            raise self.dead()
        self._loop.put(message)

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""

    def workers(self) -> list[WorkerStatus]:
        return []

    def close(self) -> None:
        if not self._process.is_here:
            return
        if self.is_running:
            self.is_running = False
            self._loop.put(Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.error = error
        finally:
            self.is_running = False
            self.last_death = self.dead()
            self._died(self.last_death)

    def dead(self) -> EngineDeadError:
        """The error for requests after the end of the engine."""
        reason = f" after {type(self.error).__name__}: {self.error}" if self.error else ""
        return EngineDeadError(
            f"The engine has ended{reason}.", "Start it again; requests can be sent once more."
        )


class LinkHost:
    """An engine at the other end of a connection, which is made again when it breaks.

    Only one event loop may use it.

    Attributes:
        where: the machine that the engine runs on.
        pid: id of the engine's process, if it is known.
        failure: the refusal of the model or of this host at the first start, which is final.
        waits_for: the reason why the engine cannot be reached at present.
        is_sought: whether to connect again when the connection breaks.
    """

    totals_last = False
    where = "localhost"
    pid: int | None = None
    waits_for = ""
    is_sought = True

    def __init__(
        self, model: str | Path, config: EngineConfig, silence: float | None = None
    ) -> None:
        """Read the model's header; `start` connects to the engine.

        An engine that does not answer pings for `silence` seconds counts as dead.

        Raises:
            TwinphaseError: the model cannot be found or read, or cannot do what `config` asks for.
        """
        self.text = ModelText.of_model(model)
        self.task = task_of(self.text.checkpoint, config)
        self.is_running = False
        self.num_restarts = 0
        self.last_death: EngineDeadError | None = None
        self.failure: Refused | None = None
        self._model = str(model)
        self._config = config
        self._silence = silence
        self._closing = False
        self._was_ready = self._ever_ready = False
        self._refused: Refused | None = None  # The present engine's refusal of the model.
        self._delay = FIRST_RETRY_SECONDS
        self._born = self._heard = 0.0
        self._own_process = OwnProcess()
        self._writer: asyncio.WriteTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, receive: Receive, died: Died) -> None:
        self._receive = receive
        self._died = died
        self._run(self._connect(0.0))

    def put(self, message: ToEngine) -> None:
        self._own_process.check()
        if not self.is_running or self._writer is None:
            raise EngineDeadError(
                "The engine is being started.", "Send the request again in a moment."
            )
        self._writer.write(self._seal(encode(message)))

    def workers(self) -> list[WorkerStatus]:
        return []

    def kill(self) -> None:
        """Close a connection that does not answer; it is made again."""
        if self._writer is not None:
            self._writer.abort()

    def close(self) -> None:
        """Ask the engine to end after its present step."""
        if not self._own_process.is_here:
            return
        self._closing = True
        self.is_running = False
        if self._writer is not None and not self._writer.is_closing():
            # The engine may end at this moment, and the loop, in another thread, close the
            # transport.
            with suppress(OSError, AttributeError, RuntimeError):
                self._writer.write(self._seal(encode(Stop())))

    async def _open(self) -> socket.socket:
        """Connect to the engine; the first message is `_load_message`."""
        raise NotImplementedError

    def _end(self) -> str:
        """Make sure that the engine ended after its connection did; return how it ended."""
        raise NotImplementedError

    def _load_message(self) -> Load:
        return Load(self._model, self._config)

    def _seal(self, data: bytes) -> bytes:
        """Encode the bytes of messages for the connection."""
        return data

    def unseal(self, data: bytes) -> bytes:
        """Decode bytes from the connection to the bytes of messages.

        Raises:
            OSError: the bytes were changed on the way.
        """
        return data

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, delay: float) -> None:
        await asyncio.sleep(delay)
        if self._closing:
            return
        self._receive(Loading("starting"))
        try:
            link = await self._open()
        except OSError as error:
            # Descriptors, memory or the worker are missing now, but may be available later.
            self.waits_for = f"{self.where}: {error.strerror or error}"
            self._receive(Loading(f"waiting to start ({error.strerror or error})"))
            self._connect_later()
            return
        except TwinphaseError as error:
            # There is no retry, since it would be refused again.
            self.failure = Refused(None, type(error).__name__, error.cause, error.fix)
            self._receive(self.failure)
            return
        self._born = time.monotonic()
        self.waits_for = ""
        loop = asyncio.get_running_loop()
        self._writer, _ = await loop.create_connection(lambda: _Link(self), sock=link)
        self._writer.write(self._seal(encode(self._load_message())))

    def _connect_later(self) -> None:
        if not self.is_sought:
            return
        self._run(self._connect(self._delay))
        self._delay = min(2 * self._delay, MAX_RETRY_SECONDS)

    async def _beat(self, writer: asyncio.WriteTransport, silence: float) -> None:
        """Ping the engine, and kill it if it stays silent; pauses of this process do not count."""
        self._heard = time.monotonic()
        while self._writer is writer:
            writer.write(self._seal(encode(Ping(time.perf_counter()))))
            slept = time.monotonic()
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            if (
                late := (now := time.monotonic()) - slept - PING_INTERVAL_SECONDS
            ) > PING_INTERVAL_SECONDS:
                self._heard = min(now, self._heard + late)
            elif now - self._heard > silence and self._writer is writer:
                # Messages that a killed engine has sent must not arrive any more.
                self.kill()
                return writer.abort()

    def take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Pong):
            return
        if isinstance(message, EngineFacts):
            self.is_running = self._was_ready = self._ever_ready = True
            if self._silence is not None and self._writer is not None:
                self._run(self._beat(self._writer, self._silence))
        if isinstance(message, Refused) and message.about is None:
            self._refused = message
            self.failure = None if self._ever_ready else message
        self._receive(message)

    def lost(self) -> None:
        self.is_running = False
        self._writer = None
        if self._closing:
            return
        how = self._end()
        reason = f" ({self._refused.cause.rstrip('.')})" if self._refused else ""
        self._refused = None
        self.last_death = EngineDeadError(
            f"{how}{reason}.", "It is being started again: send the request again."
        )
        self._died(self.last_death)
        if self.failure is not None:
            return
        self.num_restarts += 1
        if self._was_ready and time.monotonic() - self._born > HEALTHY_UPTIME_SECONDS:
            self._delay = FIRST_RETRY_SECONDS
        self._was_ready = False
        self._connect_later()


class ProcessHost(LinkHost):
    """An engine in its own process, restarted when it dies."""

    module = "twinphase.engine.process.child"
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        return self._process.pid if self._process else None

    def kill(self) -> None:
        """Kill a process that no longer answers; it is restarted."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ask the process to end after its present step, and make sure that it does."""
        process = self._process
        super().close()
        if process is None or not self._own_process.is_here:
            return
        if not self._was_ready:
            process.kill()  # The process reads no messages before it has loaded.
        try:
            process.wait(CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    async def _open(self) -> socket.socket:
        self._process, link = start_process(self.module)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        link.setblocking(False)
        return link

    def _end(self) -> str:
        process = self._process
        self._process = None
        if process is None:
            return "The engine's process ended"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.kill()
        return f"The engine's process {how_it_ended(process)}"

    def _load_message(self) -> Load:
        """The message with this process's step log; each process after the first adds a number."""
        config = self._config
        if config.trace_file and self.num_restarts:
            config = replace(config, trace_file=f"{config.trace_file}.{self.num_restarts}")
        return Load(str(self.text.checkpoint.path), config)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Link(asyncio.Protocol):
    """Splits the byte stream into messages."""

    def __init__(self, host: LinkHost) -> None:
        self._host = host
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            data = self._host.unseal(data)
        except OSError:
            self._transport.abort()
            return
        for message in self._decoder.feed(data):
            self._host.take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._host.lost()
