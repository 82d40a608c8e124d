"""Where an engine's loop lives: in a thread of this process, or in a process of its own that is started again.

A host carries messages and says when the engine has died. Not for what the messages mean.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from twinphase.config import module_command
from twinphase.engine.checks import embeds, engine_config
from twinphase.engine.embedding import LoadedEmbedder
from twinphase.engine.embedding_loop import make_loop
from twinphase.engine.exclusive_use import OwnProcess
from twinphase.engine.messages import EngineFacts, FromEngine, Load, Loading, Refused, Stop, ToEngine
from twinphase.engine.text import ModelText
from twinphase.engine.wire import SEND_BUFFER, Decoder, encode
from twinphase.errors import EngineDeadError
from twinphase.models.loader import open_model
from twinphase.weights.hub import resolve_model

__all__ = ["Host", "ProcessHost", "ThreadHost"]

FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0  # seconds before a dead engine is started again
HEALTHY_AFTER = 60.0  # seconds of life after which a death is a new one
CLOSE_SECONDS = 10.0

Receive = Callable[[FromEngine], None]
Died = Callable[[EngineDeadError], None]


class Host(Protocol):
    """Carries messages to an engine and back."""

    text: ModelText
    embeds: bool  # whether the model makes vectors, and writes no text
    is_running: bool  # whether the engine takes messages
    num_restarts: int  # so far
    last_death: EngineDeadError | None  # why the last one was needed
    failure: Refused | None  # what refused the model at the first start, if it was refused

    def start(self, receive: Receive, died: Died) -> None:
        """Begin; both functions may be called from any thread, `died` once for each death."""

    def put(self, message: ToEngine) -> None:
        """Send a message.

        Raises:
            EngineDeadError: the engine takes none, or this is a forked child.
        """

    def kill(self) -> None:
        """End an engine that answers no more, so that it is started again, where that can be done."""

    def close(self) -> None:
        """End the engine after the step it is in."""


class ThreadHost:
    """A loaded engine in a thread of this process, which ends with it."""

    num_restarts = 0
    last_death: EngineDeadError | None = None
    failure: Refused | None = None

    def __init__(self, loaded: Any) -> None:
        """The `LoadedEngine` or `LoadedEmbedder` belongs to the thread from now on."""
        self.loaded = loaded
        self.text: ModelText = loaded.text
        self.embeds = isinstance(loaded, LoadedEmbedder)
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
        """A thread cannot be ended from outside."""

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
        """What to tell those who come now."""
        reason = f" after {type(self.error).__name__}: {self.error}" if self.error else ""
        return EngineDeadError(f"The engine has ended{reason}.", "Start it again; requests can be sent once more.")


class ProcessHost:
    """An engine in a process of its own, started again whenever it dies. Used from one event loop.

    Attributes:
        num_restarts: so far.
        last_death: why the last one was needed.
        failure: what refused the model at the first start, if it was refused.
    """

    def __init__(self, model: str | Path, config: dict[str, Any]) -> None:
        """Read the model's header; the process starts with `start`.

        Raises:
            TwinphaseError: the model cannot be found or read, or the configuration is wrong.
        """
        wanted = engine_config(config)
        path = resolve_model(str(model))
        self.text = ModelText(open_model(path, header_only=True))
        self.embeds = embeds(self.text.checkpoint, wanted)
        self.is_running = False
        self.num_restarts = 0
        self.last_death: EngineDeadError | None = None
        self.failure: Refused | None = None
        self._load = Load(str(path), config)
        self._closing = False
        self._was_ready = self._ever_ready = False
        self._refused: Refused | None = None  # the model, by the process that there is
        self._delay = FIRST_DELAY
        self._own_process = OwnProcess()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._process.pid if self._process else None

    def start(self, receive: Receive, died: Died) -> None:
        self._receive, self._died = receive, died
        self._spawn(0.0)

    def put(self, message: ToEngine) -> None:
        self._own_process.check()
        if not self.is_running or self._writer is None:
            raise EngineDeadError("The engine is being started.", "Send the request again in a moment.")
        self._writer.write(encode(message))

    def kill(self) -> None:
        """End a process that answers no more; it is started again."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ask the process to end after its step, and see to it that it does."""
        if not self._own_process.is_here:
            return
        self._closing, self.is_running = True, False
        process = self._process
        if self._writer is not None and not self._writer.is_closing():
            # The process may end at this very moment, and the loop, in another thread, close the transport.
            with suppress(OSError, AttributeError, RuntimeError):
                self._writer.write(encode(Stop()))
        if process is None:
            return
        if not self._was_ready:
            process.kill()  # it reads no message before it has loaded
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self, delay: float) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(delay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, delay: float) -> None:
        await asyncio.sleep(delay)
        if self._closing:
            return
        self._receive(Loading("starting"))
        try:
            self._process, link = _start_process()
        except OSError as error:  # no descriptors or no memory left; there may be some later
            self._receive(Loading(f"waiting to start ({error.strerror or error})"))
            self._spawn_later()
            return
        self._born = time.monotonic()
        loop = asyncio.get_running_loop()
        self._writer, _ = await loop.create_connection(lambda: _Link(self), sock=link)
        self._writer.write(encode(self._load_message()))

    def _load_message(self) -> Load:
        """A log of steps is of one process: each has its own, the first the name that was asked for."""
        config = dict(self._load.config)
        if config.get("trace_file") and self.num_restarts:
            config["trace_file"] += f".{self.num_restarts}"
        return Load(self._load.model, config)

    def _spawn_later(self) -> None:
        self._spawn(self._delay)
        self._delay = min(2 * self._delay, LONGEST_DELAY)

    def take(self, message: FromEngine) -> None:
        if isinstance(message, EngineFacts):
            self.is_running = self._was_ready = self._ever_ready = True
        if isinstance(message, Refused) and message.about is None:
            self._refused = message
            self.failure = None if self._ever_ready else message
        self._receive(message)

    def lost(self) -> None:
        """The connection has ended, and so has the process, or it is about to."""
        self.is_running, self._writer = False, None
        process, self._process = self._process, None
        if self._closing or process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.kill()
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason, self._refused = f" ({self._refused.cause.rstrip('.')})" if self._refused else "", None
        cause = f"The engine's process {how}{reason}."
        self.last_death = EngineDeadError(cause, "It is being started again: send the request again.")
        self._died(self.last_death)
        if self.failure is not None:
            return
        self.num_restarts += 1
        if self._was_ready and time.monotonic() - self._born > HEALTHY_AFTER:
            self._delay = FIRST_DELAY
        self._was_ready = False
        self._spawn_later()


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of the link to it."""
    ours, theirs = socket.socketpair()
    command = [*module_command("twinphase.engine.child"), str(theirs.fileno())]
    with theirs:
        try:
            # A session of its own: Ctrl-C in the terminal is the server's business, which lets answers finish.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        except OSError:
            ours.close()
            raise
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    ours.setblocking(False)
    return process, ours


class _Link(asyncio.Protocol):
    """Cuts the stream of bytes into messages."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host
        self._decoder: Decoder[FromEngine] = Decoder(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._host.take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._host.lost()
