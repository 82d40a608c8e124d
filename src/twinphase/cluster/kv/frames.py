"""Messages about KV blocks between two workers: offers, requests, the blocks, and the results.

    message   magic "TPKV" | version | bytes of the header | bytes of the payload | header | payload
    header    MessagePack, one of the structs below; never pickle
    payload   of a `Frame` over TCP only: the bytes of `Backend.read_blocks`, which begin with the
        fingerprint

A frame names its block by its chain hash and carries the inputs of that hash, so that the receiver
can verify the name. The checksum covers the header and the payload. `transport.py` sends the bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from twinphase.cache.prefix_cache import CachedBlock
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import TwinphaseError

MAGIC = b"TPKV"
VERSION = 1
ENVELOPE = struct.Struct("<4sHxxII")
MAX_HEADER_BYTES = 1 << 24
HASH_BYTES = 32

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class ProtocolError(TwinphaseError):
    """The data is not a KV message of this version; the connection cannot continue."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message each way.

    Attributes:
        fingerprint: identifies the format of the backend's blocks; both ends must have the same.
        slot_bytes: bytes per slot of the shared memory sent with this message; 0 where frames carry
            their payload.
    """

    fingerprint: str
    slot_bytes: Count = 0


class Offer(msgspec.Struct, tag=True, frozen=True):
    """Offers blocks to the receiver; answered by `Wanted` with the same number."""

    number: int
    hashes: list[Hash]


class Wanted(msgspec.Struct, tag=True, frozen=True):
    """States for each offered block whether it is missing; only a hint: the cache may change."""

    number: int
    wanted: list[bool]


class Frame(msgspec.Struct, tag=True, frozen=True):
    """A block; answered by `Ack` with the same number.

    Attributes:
        length: bytes of the block as `Backend.read_blocks` gives it.
        slot: the block's slot in shared memory; None where the bytes follow the header.
    """

    number: int
    block_hash: Hash
    parent: Hash
    index: Count
    token_ids: list[TokenId]
    length: Count
    checksum: int
    slot: Count | None = None

    @property
    def block(self) -> CachedBlock:
        return CachedBlock(self.block_hash, self.parent, tuple(self.token_ids), self.index)


class Ack(msgspec.Struct, tag=True, frozen=True):
    """The verdict on each frame: "stored", or why the block was not stored."""

    numbers: list[int]
    verdicts: list[str]


Message = Hello | Offer | Wanted | Frame | Ack
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def frame_head(fingerprint: str) -> bytes:
    """The first bytes of every block that `Backend.read_blocks` returns."""
    head = fingerprint.encode()
    return len(head).to_bytes(4, "little") + head


def frame_bytes(loaded: LoadedEngine) -> int:
    """Bytes of each block that the backend's `read_blocks` returns."""
    backend = loaded.backend
    blocks = backend.kv_bytes_per_token() * loaded.config.block_size
    return len(frame_head(backend.kv_fingerprint)) + blocks


def encode_message(message: Message, payload_bytes: int = 0) -> bytes:
    """The envelope and the header of a message that `payload_bytes` of payload follow."""
    header = _ENCODER.encode(message)
    return ENVELOPE.pack(MAGIC, VERSION, len(header), payload_bytes) + header


def open_envelope(data: bytes | bytearray) -> tuple[int, int]:
    """The lengths of the header and the payload, in bytes.

    Raises:
        ProtocolError: the data is not the start of a KV message of this version.
    """
    magic, version, header_bytes, payload_bytes = ENVELOPE.unpack(data)
    if magic != MAGIC or version != VERSION or header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(
            "The received data is not a KV message of this version.",
            "Run one version of twinphase everywhere.",
        )
    return header_bytes, payload_bytes


def decode_header(data: bytes | bytearray) -> Message:
    """Decode the message in a header.

    Raises:
        ProtocolError: the data is not a valid header.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(
            f"A KV message cannot be read: {error}.", "Run one version everywhere."
        ) from None


def checksum(block: CachedBlock, payload: bytes | bytearray | memoryview) -> int:
    """CRC-32 of a block's hashes, index, token ids and payload."""
    names = block.block_hash + block.parent + struct.pack("<Q", block.index)
    return zlib.crc32(payload, zlib.crc32(names + _token_bytes(block.token_ids)))


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
