"""Messages as bytes between two processes: MessagePack, each with its length before it.

No pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from twinphase.errors import InvalidRequestError

# Large enough for a reader that is busy for a while.
SEND_BUFFER_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class Stream(Protocol):
    """The transport of messages: a socket, with or without encryption."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...


def encode(message: Any) -> bytes:
    """A message as bytes.

    Raises:
        InvalidRequestError: a value that no message can carry, such as an integer of more than 64
            bits.
    """
    try:
        data = _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"The request holds a value that is not supported: {error}.", "Change it."
        ) from None
    return _LENGTH.pack(len(data)) + data


class Decoder(Generic[Message]):
    """Decodes messages from bytes that arrive in pieces of any size."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now."""
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if len(buffer) - begin - _LENGTH.size < length:
                break
            begin += _LENGTH.size
            yield self._decoder.decode(bytes(buffer[begin : begin + length]))
            begin += length
        del buffer[:begin]
