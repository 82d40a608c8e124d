"""The engine's loop for a model that embeds: one text after the other, in order of arrival.

Runs where `loop.EngineLoop` does, on the same messages.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from twinphase.engine.embedding.embedder import LoadedEmbedder
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


class EmbeddingLoop:
    """Runs a model on messages; `send` gets the replies, on the loop's thread."""

    def __init__(self, loaded: LoadedEmbedder, send: Callable[[FromEngine], None]) -> None:
        self.loaded = loaded
        self._send = send
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        """Hand a message to the loop, from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Serve until `Stop`."""
        while not isinstance(message := self._inbox.get(), Stop):
            if isinstance(message, Embed):
                self._send(self._embedded(message))
            elif isinstance(message, (Add, Inspect)):
                about = message.request_id if isinstance(message, Add) else message.number
                error = InvalidRequestError(
                    "The model was loaded to embed texts.", "Ask for embeddings."
                )
                self._send(refusal(about, error))

    def _embedded(self, message: Embed) -> FromEngine:
        try:
            vector = self.loaded.embed(message.token_ids)
        except EngineDeadError:  # A new process has to be started.
            raise
        except TwinphaseError as error:
            return refusal(message.number, error)
        except Exception as error:  # An error in one text must not affect the others.
            cause = f"The text could not be embedded: {one_line(error)}."
            return refusal(message.number, TwinphaseError(cause))
        return Embedded(message.number, vector.astype("<f4").tobytes())


def make_loop(
    loaded: LoadedEngine | LoadedEmbedder, send: Callable[[FromEngine], None]
) -> tuple[EngineLoop | EmbeddingLoop, EngineFacts]:
    """The loop for a loaded model, and its facts."""
    if isinstance(loaded, LoadedEmbedder):
        model = loaded.text.checkpoint.fingerprint
        facts = EngineFacts(
            loaded.config, None, None, 0, None, None, embedding_size=loaded.size, model=model
        )
        return EmbeddingLoop(loaded, send), facts
    loop = EngineLoop(loaded, send)
    loop.pace = loaded.settle_pace()
    return loop, engine_facts(loaded, loop.pace)
