"""Responses that are kept in memory, each its tenant's own, within limits of number and bytes: the oldest go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakValueDictionary

from twinphase.errors import RequestNotFoundError
from twinphase.server.generation import Generation

__all__ = ["Kept", "Responses"]

MAX_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Kept:
    """A response: its body as JSON, and the conversation up to its end, as messages of a chat."""

    body: bytes
    messages: bytes


class Responses:
    """Responses by tenant and id, those that run among them."""

    def __init__(self, most: int) -> None:
        """`most` are kept, of all tenants together."""
        self._most, self._num_bytes = most, 0
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._lock = threading.Lock()  # whole bodies are written by threads
        self.running: WeakValueDictionary[tuple[str, str], Generation] = WeakValueDictionary()

    def put(self, tenant: str, response_id: str, kept: Kept) -> None:
        with self._lock:
            self._kept[tenant, response_id] = kept
            self._num_bytes += len(kept.body) + len(kept.messages)
            while self._kept and (len(self._kept) > self._most or self._num_bytes > MAX_KEPT_BYTES):
                self._forget(next(iter(self._kept)))

    def get(self, tenant: str, response_id: str) -> Kept:
        """Raises `RequestNotFoundError` for one that is not this tenant's, or not kept any more."""
        with self._lock:
            found = self._kept.get((tenant, response_id))
        if found is None:
            raise RequestNotFoundError(
                f"Response with id {response_id[:80]!r} not found.",
                "It was not stored here, or too many were since.",
            )
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        with self._lock:
            self._forget((tenant, response_id))

    def _forget(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key, None)
        self._num_bytes -= len(kept.body) + len(kept.messages) if kept is not None else 0
