"""Which names a server answers to, and which pages may call it: `Host` and `Origin`.

A page may point its own domain name to this machine's address (DNS rebinding), so that the browser
considers the server a part of the page's site. But `Host` then still has the page's name.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from twinphase.errors import TwinphaseError
from twinphase.server.config import ServerConfig

MAX_SHOWN_CHARACTERS = 100


class ForbiddenError(TwinphaseError):
    """The request's name or page is not allowed."""

    http_status = 403


class Doors:
    """The names and origins that a server accepts requests for.

    Without API keys, only IP addresses, localhost and configured names are accepted. With keys, any
    name and origin is accepted unless names are configured, because a page does not have a key.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._any_host = "*" in config.allowed_hosts or bool(
            config.keys and not config.allowed_hosts
        )
        self._hosts = {name.lower() for name in (*config.allowed_hosts, config.host, "localhost")}
        self._any_origin = "*" in config.allowed_origins or bool(config.keys)
        self._origins = set(config.allowed_origins)

    def check(self, host: str | None, origin: str | None) -> None:
        """Check a request's `Host` (None: HTTP/1.0, so not a browser) and `Origin` headers.

        Raises:
            ForbiddenError: the name or the origin is not allowed.
        """
        if host is not None and not self._any_host and not self._knows(host):
            shown = ascii(host[:MAX_SHOWN_CHARACTERS])
            raise ForbiddenError(
                f"The request's `Host` is {shown}, which this server does not answer to.",
                "Use its IP address or localhost, or start it with --allowed-hosts NAME or with "
                "--api-key.",
            )
        if origin is None or self._any_origin or origin in self._origins:
            return
        if host is None or origin.lower() not in (
            f"http://{host}".lower(),
            f"https://{host}".lower(),
        ):
            shown = ascii(origin[:MAX_SHOWN_CHARACTERS])
            raise ForbiddenError(
                f"The request comes from a page of {shown}, which may not call this server.",
                "Start the server with --allowed-origins ORIGIN.",
            )

    def _knows(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").removesuffix(".")
            parts.port  # noqa: B018  raises for what is no number
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return any(known.startswith("*.") and name.endswith(known[1:]) for known in self._hosts)
        return True
