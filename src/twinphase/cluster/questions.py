"""Questions to workers (inspections, embeddings); asked of another worker if one dies."""

from __future__ import annotations

from collections.abc import Collection

from twinphase.cluster.worker_view import WorkerView
from twinphase.engine.process.messages import Embed, Inspect
from twinphase.errors import EngineDeadError


class Questions:
    """The questions without an answer yet."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[WorkerView, Inspect | Embed]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def owing(self) -> list[str]:
        """Names of the workers that have unanswered questions, once per question."""
        return [view.name for view, _ in self._open.values()]

    def ask(
        self, message: Inspect | Embed, views: Collection[WorkerView], holder: WorkerView | None
    ) -> None:
        """Ask the worker that holds the request, or else the worker with the fewest questions.

        Raises:
            EngineDeadError: no worker is ready.
        """
        running = [view for view in views if view.state == "ready"]
        if not running:
            raise EngineDeadError(
                "The engine is being started.", "Send the request again in a moment."
            )
        view = holder or min(running, key=lambda view: self.owing.count(view.name))
        self._open[message.number] = view, message
        view.host.put(message)

    def end(self, number: int) -> Inspect | Embed | None:
        """Remove a question that was answered or refused; returns None if the number is unknown."""
        return self._open.pop(number, (None, None))[1]

    def of(self, view: WorkerView) -> list[Inspect | Embed]:
        """The questions that a worker has not answered."""
        return [message for holder, message in self._open.values() if holder is view]

    def clear(self) -> None:
        """Forget all questions, because no answers will come."""
        self._open.clear()
