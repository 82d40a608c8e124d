"""KV blocks in a portable form: a frame is a fingerprint, then the bits of a block.

Not for which tokens a block holds, nor for damage on the way: the code that sends frames
names and checks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import KVCacheSpec
from twinphase.blueprint import Blueprint
from twinphase.errors import KVFrameError
from twinphase.weights.checkpoint import Checkpoint

# bits that are all ones in an infinity and in what is no number (IEEE 754; bfloat16: half of a
# float32)
EXPONENTS = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
# A frame begins with the length of its fingerprint, little endian.
FINGERPRINT_LENGTH_BYTES = 4


def kv_fingerprint(
    checkpoint: Checkpoint, blueprint: Blueprint, spec: KVCacheSpec, **facts: str
) -> str:
    """What the bits of a KV block depend on besides its tokens, as "name=value" joined by ";".

    The blueprint is part of it: LongRoPE's factors are chosen by the engine's longest sequence, not
    by the file. `facts` are the backend's own.
    """
    known = {
        "model": checkpoint.fingerprint,
        "blueprint": hashlib.sha256(repr(blueprint.whole).encode()).hexdigest()[:16],
        "block_size": str(spec.block_size),
        **facts,
    }
    return ";".join(f"{name}={value}" for name, value in known.items())


def pack_frames(fingerprint: str, blocks: NDArray[np.uint8]) -> list[bytes]:
    """One frame for each row of `blocks`, uint8 [blocks, bytes of a block]."""
    head = fingerprint.encode()
    head = len(head).to_bytes(FINGERPRINT_LENGTH_BYTES, "little") + head
    return [head + block.tobytes() for block in blocks]


def unpack_frames(
    fingerprint: str, frames: Sequence[bytes | memoryview], nbytes: int
) -> NDArray[np.uint8]:
    """The rows that `pack_frames` was given, uint8 [frames, nbytes].

    Raises:
        KVFrameError: a frame of another fingerprint (the message says what differs) or of another
            length.
    """
    blocks = np.empty((len(frames), nbytes), np.uint8)
    for block, frame in zip(blocks, frames, strict=True):
        view = memoryview(frame).cast("B")
        start = FINGERPRINT_LENGTH_BYTES + int.from_bytes(view[:FINGERPRINT_LENGTH_BYTES], "little")
        found = bytes(view[FINGERPRINT_LENGTH_BYTES:start]).decode(errors="replace")
        if found != fingerprint:
            raise KVFrameError(
                "A KV block from elsewhere cannot be used here: "
                f"{_difference(found, fingerprint)}.",
                "Run the same model, version and --isa on both sides, with the same settings of "
                "the KV cache.",
            )
        if len(view) - start != nbytes:
            raise KVFrameError(
                f"A KV block has {len(view) - start} bytes, not {nbytes}.", "Send it again."
            )
        block[:] = view[start:]
    return blocks


def is_finite(
    frame: bytes | bytearray | memoryview, dtype: str, first: int = 0, nbytes: int | None = None
) -> bool:
    """Whether `nbytes` of a frame's bits, from byte `first` on, are finite numbers.

    Args:
        frame: as `pack_frames` makes them.
        dtype: of these numbers, one of `EXPONENTS`.
        first: byte behind the fingerprint.
        nbytes: up to the frame's end if it is None.
    """
    (kind, exponent) = EXPONENTS[dtype]
    start = FINGERPRINT_LENGTH_BYTES + int.from_bytes(frame[:FINGERPRINT_LENGTH_BYTES], "little")
    view = memoryview(frame)[start + first :]
    bits = np.frombuffer(view if nbytes is None else view[:nbytes], kind) & kind(exponent)
    return not (bits == exponent).any()


def _difference(found: str, fingerprint: str) -> str:
    there = dict(fact.split("=", 1) for fact in found.split(";") if "=" in fact)
    here = dict(fact.split("=", 1) for fact in fingerprint.split(";"))
    if there.keys() != here.keys():
        return "it does not begin with the fingerprint of this backend"
    return ", ".join(
        f"its {name} is {there[name]}, not {here[name]}"
        for name in here
        if there[name] != here[name]
    )
