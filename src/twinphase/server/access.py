"""Who may ask, and how much at once: API keys and tenants, queue limits. Not for what is asked."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.errors import EngineUnavailableError, InvalidRequestError, OverloadedError, TwinphaseError
from twinphase.server.config import ServerConfig

__all__ = ["Access", "Admission", "AuthenticationError", "Ticket", "salted", "shutting_down"]

RECENT = 0.1  # weight of the latest request in the fading mean of their durations
LONGEST_RETRY = 60  # seconds


class AuthenticationError(TwinphaseError):
    """No API key, or one that is not known."""

    http_status = 401


class Access:
    """API keys, of which only digests are kept."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an Authorization header: one name for each key, "" when no keys are asked for.

        Every key is compared, each in constant time, so that the delay tells nothing about a near miss.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        known = [hmac.compare_digest(digest, own) for own in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            what = "The API key is not known." if authorization else "No API key was given."
            raise AuthenticationError(what, "Send the header `Authorization: Bearer KEY`.")
        return digest.hex()[:16]


def salted(tenant: str, cache_salt: str | None) -> str | None:
    """The salt of the prefix cache for a tenant's request: tenants never share, whatever salt they choose."""
    return f"{tenant}|{cache_salt or ''}" if tenant else cache_salt


def shutting_down() -> EngineUnavailableError:
    return EngineUnavailableError("The server is shutting down.", "Send the request to another, or later.")


@dataclass
class Ticket:
    """A request's place, counted until it is given back."""

    admission: Admission
    num_requests: int
    num_tokens: int = 0  # of prompts not yet begun

    def queue(self, num_tokens: int) -> None:
        """The prompts are known and wait, unless too many tokens wait already."""
        admission, config = self.admission, self.admission.config
        if admission.queued_tokens and admission.queued_tokens + num_tokens > config.max_queued_tokens:
            raise admission.overloaded(f"{admission.queued_tokens} prompt tokens wait to be read")
        self.num_tokens = num_tokens
        admission.queued_tokens += num_tokens

    def begun(self, num_tokens: int) -> None:
        """A prompt of that many tokens is being read."""
        self.admission.queued_tokens -= min(num_tokens, self.num_tokens)
        self.num_tokens -= min(num_tokens, self.num_tokens)

    def leave(self, seconds: float | None = None) -> None:
        """The request is over; `seconds` is how long it took, if it was served."""
        self.begun(self.num_tokens)
        self.admission.num_requests -= self.num_requests
        self.num_requests = 0
        if seconds is not None:
            usual = self.admission.usual_seconds
            self.admission.usual_seconds = usual + RECENT * (seconds - usual) if usual else seconds


class Admission:
    """Counts what was let in; refuses at once what would only wait.

    Attributes:
        num_requests: let in and not over, each answer to each prompt counted.
        queued_tokens: prompt tokens not yet begun.
        usual_seconds: that requests took of late.
        draining: nothing more is let in.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.num_requests = self.queued_tokens = 0
        self.usual_seconds = 0.0
        self.num_seats = 1
        self.draining = False

    def enter(self, num_requests: int) -> Ticket:
        """Let in a request that becomes `num_requests` for the engine, or refuse it: too many at once, or draining."""
        if self.draining:
            raise shutting_down()
        most = self.num_seats + self.config.max_queued_requests
        if num_requests > most:
            raise InvalidRequestError(
                f"The request asks for {num_requests} answers at once; {most} are allowed.", "Split it."
            )
        if self.num_requests + num_requests > most:
            raise self.overloaded(f"{self.num_requests} requests run or wait")
        self.num_requests += num_requests
        return Ticket(self, num_requests)

    def overloaded(self, why: str) -> OverloadedError:
        """The refusal, with the time after which to try again."""
        error = OverloadedError(f"The server is overloaded: {why}.", f"Try again in {self.retry_after} s.")
        error.retry_after = self.retry_after
        return error

    @property
    def retry_after(self) -> int:
        """Seconds until about one more request can be let in."""
        rounds = max(1.0, self.num_requests / self.num_seats)
        return min(LONGEST_RETRY, max(1, math.ceil(self.usual_seconds * rounds / 2)))
