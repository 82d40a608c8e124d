"""Responses kept in memory by tenant, within limits on their number and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from twinphase.errors import InvalidRequestError, RequestNotFoundError
from twinphase.server.generation import Generation

MAX_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class Kept:
    """A kept response, as JSON: its body, the conversation with its answer, and its input items."""

    body: bytes
    messages: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.messages) + len(self.input_items)

    def page(self, limit: int, order: str, after: str | None) -> dict[str, Any]:
        """Up to `limit` items as an OpenAI list, newest first unless `order` is "asc"."""
        items = msgspec.json.decode(self.input_items)
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise InvalidRequestError(
                f"after is {after[:80]!r}, which is not an item of this response.", "Leave it out."
            )
        first = ids.index(after) + 1 if after is not None else 0
        data = items[first : first + limit]
        ids = ids[first : first + limit]
        more = first + limit < len(items)
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return {"object": "list", "data": data, **ends, "has_more": more}


class Responses:
    """Kept and running responses by tenant and id."""

    def __init__(self, most: int) -> None:
        """`most`: maximum number of kept responses of all tenants together."""
        self._most = most
        self._kept: dict[str, dict[str, Kept]] = {}  # Responses by tenant, oldest first.
        self._lock = threading.Lock()  # Complete bodies are written by threads.
        self.running: WeakValueDictionary[tuple[str, str], Generation] = WeakValueDictionary()

    def put(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Keep a response; the tenant that stores the most is evicted from, not other tenants."""
        with self._lock:
            self._kept.setdefault(tenant, {})[response_id] = kept
            self._limit(len, self._most)
            self._limit(lambda own: sum(each.num_bytes for each in own.values()), MAX_KEPT_BYTES)

    def get(self, tenant: str, response_id: str) -> Kept:
        """Return a kept response; raises `RequestNotFoundError` if this tenant has none."""
        with self._lock:
            found = self._kept.get(tenant, {}).get(response_id)
        if found is None:
            raise RequestNotFoundError(
                f"Response {response_id[:80]!r} was not found: it has expired, or was created "
                "with `store`: false.",
                "Send the conversation in `input`.",
            )
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        self.get(tenant, response_id)
        with self._lock:
            self._forget(tenant, response_id)

    def _limit(self, size: Callable[[dict[str, Kept]], int], most: int) -> None:
        sizes = {tenant: size(own) for tenant, own in self._kept.items()}
        while sum(sizes.values()) > most:
            tenant = max(sizes, key=sizes.__getitem__)
            own = self._kept[tenant]
            self._forget(tenant, next(iter(own)))
            sizes[tenant] = size(own)

    def _forget(self, tenant: str, response_id: str) -> None:
        own = self._kept.get(tenant, {})
        own.pop(response_id, None)
        if not own:
            self._kept.pop(tenant, None)
