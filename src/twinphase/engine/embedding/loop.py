"""The engine's loop for a model that embeds: each pass computes texts of several requests.

It replaces `loop.EngineLoop` and takes the same messages. Tenants take turns by the number of
tokens computed for them, as in `scheduler/fairness.py`; a tenant's requests run in order of
arrival.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twinphase.engine.embedding.embedder import MAX_PASS_TEXTS, LoadedEmbedder
from twinphase.engine.frontends.checks import DO, USE
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.loop import EngineLoop, engine_facts, refusal
from twinphase.engine.process.messages import (
    Add,
    Embed,
    Embedded,
    EngineFacts,
    FromEngine,
    Inspect,
    Stop,
    ToEngine,
)
from twinphase.errors import EngineDeadError, InvalidRequestError, TwinphaseError, one_line
from twinphase.models.tasks import matryoshka_sizes


@dataclass(eq=False)
class _Job:
    """The texts of a message, and the vectors computed so far."""

    message: Embed
    vectors: list[bytes] = field(default_factory=list)
    num_taken: int = 0


class EmbeddingLoop:
    """Runs a model on messages; `send` gets the replies, on the loop's thread."""

    def __init__(self, loaded: LoadedEmbedder, send: Callable[[FromEngine], None]) -> None:
        self.loaded = loaded
        self._send = send
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._lines: dict[str, deque[_Job]] = {}  # Waiting jobs by tenant.
        # Computed tokens / weight by tenant, since the loop was last idle.
        self._times: dict[str, float] = {}

    def put(self, message: ToEngine) -> None:
        """Hand a message to the loop, from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Serve until `Stop`."""
        while True:
            while not self._lines or not self._inbox.empty():
                message = self._inbox.get()
                if isinstance(message, Stop):
                    return
                self._take(message)
            self._pass()

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Embed):
            try:
                for text in message.texts:
                    self.loaded.check(text)
            except TwinphaseError as error:
                self._send(refusal(message.number, error))
                return
            self._add(_Job(message))
        elif isinstance(message, (Add, Inspect)):
            about = message.request_id if isinstance(message, Add) else message.number
            problem = InvalidRequestError(
                f"The model was loaded to {DO[self.loaded.task]}.", USE[self.loaded.task]
            )
            self._send(refusal(about, problem))

    def _add(self, job: _Job) -> None:
        """Queue a job for its tenant; a tenant earns no credit while it has no requests."""
        if not self._lines:
            self._times.clear()
        tenant = job.message.tenant
        now = min((self._times[waiting] for waiting in self._lines), default=0.0)
        self._times[tenant] = max(self._times.get(tenant, 0.0), now)
        self._lines.setdefault(tenant, deque()).append(job)

    def _pass(self) -> None:
        """Compute texts of the tenants whose turn it is, and reply to complete jobs."""
        taken: list[_Job] = []
        texts: list[list[int]] = []
        starts: list[int] = []
        room = self.loaded.pass_tokens
        while self._lines and len(texts) < MAX_PASS_TEXTS:
            tenant = min(self._lines, key=self._times.__getitem__)
            job = self._lines[tenant][0]
            text = job.message.texts[job.num_taken]
            if texts and len(text) > room:
                break
            room -= len(text)
            texts.append(text)
            starts += job.message.starts[job.num_taken : job.num_taken + 1]
            taken.append(job)
            self._times[tenant] += len(text) / job.message.weight
            job.num_taken += 1
            if job.num_taken == len(job.message.texts):
                self._lines[tenant].popleft()
                if not self._lines[tenant]:
                    del self._lines[tenant]
        for job, vector in zip(taken, self._vectors(texts, starts), strict=True):
            if isinstance(vector, TwinphaseError):
                self._drop(job, vector)
            else:
                job.vectors.append(vector)
            if len(job.vectors) == len(job.message.texts):
                self._send(Embedded(job.message.number, job.vectors))

    def _vectors(self, texts: list[list[int]], starts: list[int]) -> list[bytes | TwinphaseError]:
        """The vector of each text, or its error, which must not affect the others."""
        try:
            return [vector.astype("<f4").tobytes() for vector in self.loaded.embed(texts, starts)]
        except EngineDeadError:  # The engine cannot continue: a new process has to be started.
            raise
        except Exception as error:
            if len(texts) > 1:
                return [
                    vector
                    for number, text in enumerate(texts)
                    for vector in self._vectors([text], starts[number : number + 1])
                ]
            if isinstance(error, TwinphaseError):
                return [error]
            return [TwinphaseError(f"The text could not be computed: {one_line(error)}.")]

    def _drop(self, job: _Job, error: TwinphaseError) -> None:
        """Refuse a message, and compute no more of its texts."""
        line = self._lines.get(job.message.tenant, deque())
        if job in line:
            line.remove(job)
            if not line:
                del self._lines[job.message.tenant]
        self._send(refusal(job.message.number, error))


def make_loop(
    loaded: LoadedEngine | LoadedEmbedder, send: Callable[[FromEngine], None]
) -> tuple[EngineLoop | EmbeddingLoop, EngineFacts]:
    """The loop for a loaded model, and its facts."""
    if isinstance(loaded, LoadedEmbedder):
        checkpoint = loaded.text.checkpoint
        facts = EngineFacts(
            loaded.config,
            *(None, None, 0, None, None),
            embedding_size=loaded.size,
            matryoshka_sizes=matryoshka_sizes(checkpoint),
            model=checkpoint.fingerprint,
        )
        return EmbeddingLoop(loaded, send), facts
    loop = EngineLoop(loaded, send)
    loop.pace = loaded.settle_pace()
    return loop, engine_facts(loaded, loop.pace)
