"""HTTPS: the server's certificate, and whether clients need one too.

`cluster/encryption.py` encrypts connections within a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinphase.errors import InvalidRequestError, StorageError, TwinphaseError
from twinphase.server.config import ServerConfig

LOG = logging.getLogger("twinphase.server")
REFRESH_INTERVAL_SECONDS = 10.0


class Certificate:
    """The TLS context for new connections; a renewed certificate is reloaded.

    Attributes:
        context: TLS context of the listening socket.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Read the files that `config` names.

        Raises:
            StorageError: a file cannot be read.
            InvalidRequestError: a file has other content, or the key does not belong to the
                certificate.
        """
        assert config.ssl_certfile is not None
        self._files = (config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile)
        self._changed_at: list[int] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load()
        if (authorities := config.ssl_ca_certs) is not None:
            with _reading(authorities, problem=f"{authorities} holds no certificate."):
                self.context.load_verify_locations(authorities)
            self.context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)

    async def keep_fresh(self) -> None:
        """Call `refresh` periodically, until this task is cancelled."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Reload the files if they have changed; keep the old pair if the new one is invalid."""
        before = self._changed_at
        try:
            self._load()
        except TwinphaseError as error:
            if self._changed_at != before:
                LOG.warning("The renewed certificate is not used: %s", error)
            return
        if self._changed_at != before:
            LOG.info("Renewed: new connections use the certificate in %s", self._files[0])

    def _load(self) -> None:
        certificate, key = self._files
        problem = f"{certificate} and {key} do not hold a certificate and its key."
        with _reading(*self._files, problem=problem):
            changed_at = [Path(file).stat().st_mtime_ns for file in self._files]
            if changed_at == self._changed_at:
                return
            self._changed_at = changed_at
            # The files are loaded into a separate context first, where an invalid pair does no
            # harm.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                context.load_cert_chain(certificate, key, _refuse_password)


@contextmanager
def _reading(*files: str, problem: str) -> Iterator[None]:
    try:
        for file in files:
            Path(file).read_bytes()
        yield
    except ssl.SSLError as error:
        reason = f" ({error.reason.replace('_', ' ').lower()})" if error.reason else ""
        raise InvalidRequestError(
            f"{problem.rstrip('.')}{reason}.", "Give files in PEM form that belong together."
        ) from None
    except OSError as error:
        raise StorageError(
            f"Cannot read {error.filename}: {error.strerror}.", "Give another file."
        ) from None


def _refuse_password() -> str:
    raise InvalidRequestError(
        "The key of --ssl-keyfile is encrypted.",
        "Decrypt it: openssl pkey -in KEY -out PLAIN_KEY; chmod 600 PLAIN_KEY.",
    )
