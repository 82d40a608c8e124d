"""Where a worker listens, and the key that it and its server share."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import cast, get_args

from twinphase.cluster.handshake import ClusterKey, Encryption
from twinphase.errors import InvalidRequestError, StorageError

KEY_VARIABLE = "TWINPHASE_CLUSTER_KEY"
ENCRYPTION_VARIABLE = "TWINPHASE_CLUSTER_ENCRYPTION"
UNENCRYPTED = (
    "Connections between this cluster's machines are not encrypted (--cluster-encryption off): "
    "anyone on their network can read prompts and answers."
)
MIN_KEY_BYTES = 16
CONNECT_SECONDS = 5.0


def read_key(file: str | None = None, encryption: str | None = None) -> ClusterKey:
    """The key in a file or in the environment; command lines are visible to all users of a machine.

    If `encryption` is None, it comes from the environment too; its default is `auto`.

    Raises:
        StorageError: the file cannot be read.
        InvalidRequestError: the key is missing or too short, or `encryption` is not one of the
            choices.
    """
    if file is not None:
        try:
            key = Path(file).read_bytes().strip()
        except OSError as error:
            raise StorageError(
                f"Cannot read the key in {file}: {error.strerror}.", "Give another file."
            ) from None
    else:
        key = os.environ.get(KEY_VARIABLE, "").encode(errors="surrogateescape").strip()
    if len(key) < MIN_KEY_BYTES:
        raise InvalidRequestError(
            f"The workers' key has {len(key)} characters." if key else "The workers have no key.",
            f"Set {KEY_VARIABLE}, or give --cluster-key-file, with {MIN_KEY_BYTES} characters "
            "or more; "
            "`openssl rand -hex 32` makes one.",
        )
    encryption = encryption or os.environ.get(ENCRYPTION_VARIABLE) or "auto"
    if encryption not in get_args(Encryption):
        raise InvalidRequestError(
            f"The encryption of the cluster is {encryption!r}.",
            f"Use one of: {', '.join(get_args(Encryption))}.",
        )
    return ClusterKey(key, cast(Encryption, encryption))


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a socket that listens at HOST:PORT or unix:PATH, and its address with the actual port.

    Raises:
        InvalidRequestError: `address` is not an address.
        StorageError: the address is in use or not available.
    """
    family, place = _parse(address)
    listener = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        if family == socket.AF_UNIX:
            os.chmod(str(place), 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise StorageError(
            f"Cannot listen on {address}: {error.strerror or error}.", "Choose another --listen."
        ) from None
    if family == socket.AF_UNIX:
        return listener, address
    return listener, f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"


def connect(address: str) -> socket.socket:
    """Return a blocking connection to a worker.

    Raises:
        InvalidRequestError: `address` is not an address.
        OSError: nothing listens there.
    """
    family, place = _parse(address)
    link = socket.socket(family)
    try:
        link.settimeout(CONNECT_SECONDS)
        link.connect(place)
        link.settimeout(None)
        prepare(link)
    except BaseException:
        link.close()
        raise
    return link


def prepare(link: socket.socket) -> None:
    """Disable Nagle's algorithm: messages with tokens are small and must leave at once."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _parse(address: str) -> tuple[int, str | tuple[str, int]]:
    if address.startswith("unix:") and len(address) > len("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(
            f"{address!r} is not the address of a worker.", "Use HOST:PORT or unix:PATH."
        )
    name = host.strip("[]")
    return (socket.AF_INET6 if ":" in name else socket.AF_INET), (name, int(port))
