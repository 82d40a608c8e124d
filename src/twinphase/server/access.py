"""API keys, tenants and queue limits."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from twinphase.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    TwinphaseError,
)
from twinphase.server.config import ServerConfig

# Weight of the latest request in the moving average of a tenant's work per request.
LATEST_WEIGHT = 0.1
SHARE_WINDOW_SECONDS = 10.0
MAX_RETRY_SECONDS = 60


class AuthenticationError(TwinphaseError):
    """The API key is missing or unknown."""

    http_status = 401


class Access:
    """API keys, stored as digests, and their tenants."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` maps each key to its tenant."""
        self._tenants = [
            (hashlib.sha256(key.encode()).digest(), tenant) for key, tenant in keys.items()
        ]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header; "" if the server has no keys.

        Every key is compared in constant time, so that response times reveal nothing about keys.
        """
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        known = [tenant for own, tenant in self._tenants if hmac.compare_digest(digest, own)]
        if scheme.lower() != "bearer" or not known:
            what = "The API key is not known." if key else "No API key was given."
            raise AuthenticationError(
                what, "Send the header `Authorization: Bearer KEY`, or `x-api-key: KEY`."
            )
        return known[0]


def salted(tenant: str, cache_salt: str | None) -> str | None:
    """The prefix cache's salt for a tenant's request: tenants do not share cached prefixes."""
    return f"{tenant}|{cache_salt or ''}" if tenant else cache_salt


def shutting_down() -> EngineUnavailableError:
    return EngineUnavailableError(
        "The server is shutting down.", "Send the request to another, or later."
    )


@dataclass
class Ticket:
    """The place that a request takes within the limits until it leaves."""

    admission: Admission
    tenant: Tenant
    num_requests: int
    num_tokens: int = 0  # Tokens of prompts that are not in prefill yet.

    def queue(self, num_tokens: int) -> None:
        """Count prompt tokens as queued; refuse them if the tenant has queued too many."""
        waiting = self.tenant.queued_tokens
        if waiting and waiting + num_tokens > self.admission.config.max_queued_tokens:
            raise self.admission.overloaded(self.tenant, f"{waiting} prompt tokens are queued")
        self.num_tokens = num_tokens
        self.tenant.queued_tokens += num_tokens

    def begun(self, num_tokens: int) -> None:
        """Note that a prompt of `num_tokens` tokens is in prefill."""
        self.tenant.queued_tokens -= min(num_tokens, self.num_tokens)
        self.num_tokens -= min(num_tokens, self.num_tokens)

    def leave(self, seconds: float | None = None) -> None:
        """Note the request's end; `seconds` is its duration, if it was served."""
        tenant = self.tenant
        count = self.num_requests
        self.begun(self.num_tokens)
        tenant.num_requests -= count
        self.num_requests = 0
        if seconds is not None:
            usual = tenant.usual_work
            now = tenant.work / max(1, count)
            tenant.usual_work = usual + LATEST_WEIGHT * (now - usual) if usual else now
            tenant.work = 0.0


@dataclass
class Tenant:
    """One tenant's requests and work.

    Attributes:
        weight: share relative to other tenants.
        num_requests: number of admitted, unfinished requests; each answer to each prompt counts.
        queued_tokens: prompt tokens that wait for prefill.
        work: predicted seconds of the engine's steps since the end of its last request.
        usual_work: moving average of `work` per request.
    """

    weight: float = 1.0
    num_requests: int = 0
    queued_tokens: int = 0
    work: float = 0.0
    usual_work: float = 0.0


class Admission:
    """Counts each tenant's requests, and refuses requests beyond the limits of its queue.

    Attributes:
        tenants: tenants by name; "" without keys.
        draining: whether new requests are refused.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        names = set(config.keys.values()) or {""}
        self.tenants = {name: Tenant(config.weights.get(name, 1.0)) for name in sorted(names)}
        self.num_seats = 1
        self.draining = False
        # End times of recent steps, and the work of each step by tenant.
        self._recent: deque[tuple[float, dict[str, float]]] = deque()

    @property
    def num_requests(self) -> int:
        return sum(tenant.num_requests for tenant in self.tenants.values())

    def enter(self, name: str, num_requests: int) -> Ticket:
        """Admit a tenant's request that becomes `num_requests` for the engine.

        Raises:
            EngineUnavailableError: the server is shutting down.
            InvalidRequestError: the request has more parts than an empty queue can hold.
            OverloadedError: the tenant has too many requests.
        """
        if self.draining:
            raise shutting_down()
        tenant = self.tenants[name]
        most = self.num_seats + self.config.max_queued_requests
        if num_requests > most:
            raise InvalidRequestError(
                f"The request asks for {num_requests} answers at once; {most} are allowed.",
                "Split it.",
            )
        if tenant.num_requests + num_requests > most:
            raise self.overloaded(tenant, f"{tenant.num_requests} requests run or wait")
        tenant.num_requests += num_requests
        return Ticket(self, tenant, num_requests)

    def step(self, end: float, work: dict[str, float]) -> None:
        """Count a step that ended at `end`; `work` is its predicted seconds by tenant."""
        for name, seconds in work.items():
            if name in self.tenants:
                self.tenants[name].work += seconds
        self._recent.append((end, work))
        while self._recent[0][0] < end - SHARE_WINDOW_SECONDS:
            self._recent.popleft()

    def share(self, name: str) -> dict[str, float | None]:
        """A tenant's share of recent work, and its fair share among active tenants."""
        had = sum(work.get(name, 0.0) for _, work in self._recent)
        whole = sum(sum(work.values()) for _, work in self._recent)
        return {
            "had": round(had / whole, 4) if whole else None,
            "due": round(self._due(self.tenants[name]), 4),
        }

    def overloaded(self, tenant: Tenant | None, why: str) -> OverloadedError:
        """The refusal of a request; its retry time is that of the tenant's queue."""
        seconds = 0.0
        if tenant is not None:
            seconds = max(1, self._waiting(tenant)) * tenant.usual_work / self._due(tenant)
        retry_after = min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))
        error = OverloadedError(
            f"The server is overloaded: {why}.", f"Try again in {retry_after} s."
        )
        error.retry_after = retry_after
        return error

    @property
    def queue_seconds(self) -> float:
        """Predicted seconds until all waiting requests are served."""
        return sum(self._waiting(tenant) * tenant.usual_work for tenant in self.tenants.values())

    def _waiting(self, tenant: Tenant) -> int:
        """Number of the tenant's requests beyond those that the engine runs at once."""
        return max(0, tenant.num_requests - self.num_seats)

    def _due(self, tenant: Tenant) -> float:
        here = [
            each.weight for each in self.tenants.values() if each.num_requests or each is tenant
        ]
        return tenant.weight / sum(here)
