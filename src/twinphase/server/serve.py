"""`twinphase serve`: starts a server from a configuration, and ends it.

`app.py` handles requests.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from twinphase import __version__, terminal
from twinphase.engine.process.host import Host
from twinphase.engine.process.messages import EngineFacts, Loading
from twinphase.errors import StorageError
from twinphase.server.app import make_app
from twinphase.server.config import ServerConfig
from twinphase.server.connection import Connection
from twinphase.server.logs import start_logging
from twinphase.server.service import Service
from twinphase.server.started import noted
from twinphase.server.tls import Certificate

# Size of the system's send buffer per connection.
SEND_BUFFER_BYTES = 256 << 10
# Connections may take this long to close after all requests have ended.
SHUTDOWN_TIMEOUT_SECONDS = 5
POLL_SECONDS = 0.05
# Shorter stages of loading are not listed.
NAMED_SECONDS = 0.05
LOG = logging.getLogger("twinphase.server")


def serve(model: str, make_host: Callable[[], Host], config: ServerConfig) -> int:
    """Serve a model on the host from `make_host` until SIGTERM or SIGINT; return the exit code."""
    start_logging(config.log_level, config.log_format)
    terminal.transient("")
    LOG.info("twinphase %s starts with the model %s", __version__, model)
    certificate = Certificate(config) if config.ssl_certfile is not None else None
    host = make_host()
    service = Service(host, model, config)
    service.sampling_defaults  # noqa: B018  a wrong file is refused before anything is loaded
    listener = _listen(config)
    settings = uvicorn.Config(
        make_app(service),
        loop="uvloop",
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
    )
    server = _Server(settings, service, listener, certificate)
    with noted(server.url):
        server.run(sockets=[listener])
    LOG.info("Stopped")
    if service.failure is not None:
        raise service.failure
    return 0


def facts_lines(facts: EngineFacts, service: Service, url: str) -> list[str]:
    """The lines that a server prints when it is ready."""
    config = facts.config
    text = service.host.text
    kind = (
        f"{text.quantization}, "
        f"{terminal.describe_bytes(sum(file.nbytes for file in text.checkpoint.files))}"
    )
    name = f"model      {', '.join(service.model_names)} ({text.checkpoint.path.name}, {kind})"
    address = f"listening  {url}/v1 (OpenAI's API), {url}/docs, {url}/metrics"
    if facts.shape is None:
        texts = f"texts of up to {config.max_model_len:,} tokens"
        does = f"scores     pairs of {texts}: /v1/rerank, /v1/score"
        if config.task == "embed":
            does = (
                f"embeds     {texts}, {facts.embedding_size} numbers each, {config.pooling} pooling"
            )
        return [name, does, address]
    capacity = (config.num_kv_blocks or 0) * config.block_size
    length = config.max_model_len or 1
    measured = []
    if facts.ttft is not None and facts.tpot is not None:
        measured = [
            f"measured   TTFT {1e3 * facts.ttft:,.0f} ms for a prompt of "
            f"{facts.warm_up_tokens:,} tokens, "
            f"TPOT {1e3 * facts.tpot:.1f} ms, one request alone"
        ]
    measured += [*pace_lines(facts)]
    measured.append(f"sampling   {service.sampling_defaults}, where a request gives none")
    measured += [f"ranks      {terminal.describe_ranks(facts.ranks)}"] if facts.ranks else []
    if workers := service.host.workers():
        pools = any(worker.role == "prefill" for worker in workers)
        how = (
            "a prompt goes to the prefill pool if that pays, which short ones do not"
            if pools
            else "to which the requests are divided"
        )
        measured.append(
            f"engines    {len(workers)}, {how}; `twinphase status --url {url}` shows them"
        )
    return [
        name,
        f"KV cache   {capacity:,} tokens: {capacity / length:.1f} requests of the full {length:,}, "
        f"{config.max_num_seqs} run at once; "
        f"{terminal.describe_bytes(capacity * facts.shape.kv_token_bytes)}",
        *state_lines(facts),
        *measured,
        *([f"page       {url}/ shows both phases of every request"] if service.config.page else []),
        address,
    ]


def state_lines(facts: EngineFacts) -> Iterator[str]:
    """A line on the slots for recurrent states, if the model has such layers."""
    slots = facts.config.num_state_slots
    if slots and facts.shape:
        yield (
            f"states     {slots:,} slots of {facts.shape.state_bytes / 1e6:,.1f} MB, two per "
            "running request and the others for prefixes; "
            f"{terminal.describe_bytes(slots * facts.shape.state_bytes)}"
        )


def pace_lines(facts: EngineFacts) -> Iterator[str]:
    """Lines on the gap between tokens of running answers during prefills, and its cost."""
    pace = facts.pace
    if pace is None:
        return
    gap = f"{1e3 * pace.gap_seconds:,.0f} ms"
    cost = (
        f"a prompt of {pace.prompt_tokens:,} tokens beside one answer takes "
        f"{pace.prompt_seconds:.1f} s"
    )
    instead = f"{cost} instead of {pace.uncut_prompt_seconds:.1f} s"
    if pace.slo_seconds is None:
        yield f"pace       running answers may wait {gap} for a token (--itl-slo-ms off); {cost}"
        return
    slo = 1e3 * pace.slo_seconds
    if pace.gap_seconds > pace.slo_seconds:
        yield (
            f"pace       --itl-slo-ms {slo:g} is less than this machine reaches, which is about "
            f"{gap} beside a long prompt; {instead}"
        )
    else:
        why = ", chosen by measured steps" if pace.chosen else ""
        yield (
            f"pace       --itl-slo-ms {slo:.0f}{why}: the longest that running answers wait for a "
            f"token beside a prefill; {instead}"
        )


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
    )  # Accepted connections inherit it.
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise StorageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror or error}.",
            "Choose another --port or --host.",
        ) from None
    listener.set_inheritable(False)
    return listener


class _Stages:
    """The stages of loading: shown while they last, then listed with their times."""

    def __init__(self) -> None:
        self._now = "starting"
        self._start = self._began = time.monotonic()
        self._spent: dict[str, float] = {}
        self._bar = terminal.Bar("Starting", "", patience=0, even=True)
        self._shown = -1

    def show(self, progress: Loading | None) -> None:
        now = time.monotonic()
        stage = progress.stage if progress is not None else self._now
        if stage != self._now:
            self._end()
            self._now = stage
            self._began = now
            self._shown = -1
            self._bar.clear()
            self._bar = terminal.Bar(stage.capitalize(), "", patience=0, even=True)
        if progress is not None and progress.total:
            self._bar.update(progress.done, progress.total)
        elif int(now - self._began) > self._shown:
            self._shown = int(now - self._began)
            terminal.transient(f"{stage.capitalize()} ... {self._shown} s")

    def _end(self) -> None:
        before = self._spent.get(self._now, 0.0)
        self._spent[self._now] = before + time.monotonic() - self._began

    def __str__(self) -> str:
        self._end()
        parts = [
            f"{stage} {seconds:.1f} s"
            for stage, seconds in self._spent.items()
            if seconds >= NAMED_SECONDS
        ]
        return f"{time.monotonic() - self._start:.1f} s: {', '.join(parts)}"


class _Server(uvicorn.Server):
    """Lets running requests finish on the first signal, and ends at once on the second."""

    def __init__(
        self,
        settings: uvicorn.Config,
        service: Service,
        listener: socket.socket,
        certificate: Certificate | None,
    ) -> None:
        super().__init__(settings)
        self._service = service
        self._certificate = certificate
        scheme = "http"
        if certificate is not None:
            settings.load()
            settings.ssl = certificate.context
            scheme = "https"
        host, port = listener.getsockname()[:2]
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = self._service
        if service.admission.draining:
            self.config.timeout_graceful_shutdown = 1
            service.drain(0)
            return
        count = len(service.in_flight)
        ends = f": {count} requests may finish; once more ends them" if count else ""
        LOG.info("Stopping%s", ends)
        service.drain(service.config.drain_timeout)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for sig in signals:
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        tasks = [
            asyncio.create_task(self._announce()),
            asyncio.create_task(self._end_when_drained()),
        ]
        if self._certificate is not None:
            tasks.append(asyncio.create_task(self._certificate.keep_fresh()))
        try:
            await self._serve(sockets)
        finally:
            for task in tasks:
                task.cancel()
            for sig in signals:  # uvloop leaves signals to a closed loop.
                loop.remove_signal_handler(sig)

    async def _end_when_drained(self) -> None:
        await self._service.drained.wait()
        self.should_exit = True

    async def _announce(self) -> None:
        """Show the progress of loading, then the facts of the loaded model."""
        service = self._service
        stages = _Stages()
        while service.facts is None or not service.host.is_running:
            if service.failure is not None:
                self.should_exit = True
                break
            stages.show(service.engine.progress if service.engine else None)
            await asyncio.sleep(POLL_SECONDS)
        terminal.transient("")
        if service.facts is None:
            return
        gc.collect()
        # Otherwise the collector would scan every route and type during an answer, which takes 0.1
        # s.
        gc.freeze()
        for line in facts_lines(service.facts, service, self.url):
            terminal.note(line)
        LOG.info("Ready after %s", stages)
