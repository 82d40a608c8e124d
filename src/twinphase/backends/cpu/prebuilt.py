"""Kernels that a wheel brings along: object files compiled when it was built, one bundle per path.

A first run would compile for up to half a minute. `release/build_kernels.py` writes the bundles; a
checkout has none and compiles. A bundle counts only for the very kernel sources it was made from.
"""

from __future__ import annotations

import functools
import lzma
from pathlib import Path

import msgspec

from twinphase.weights.storage import write_atomically

FOLDER = Path(__file__).with_name("prebuilt")


class Bundle(msgspec.Struct, frozen=True):
    """The compiled kernels of one instruction-set path.

    Attributes:
        sources: SHA-256 of the kernel sources, in hexadecimal digits.
        versions: versions of the packages that compiled them, by name.
        cpu: LLVM's name of the processor they were compiled for.
        objects: content of the object file of each kernel, by spec.
    """

    sources: str
    versions: dict[str, str]
    cpu: str
    objects: dict[str, bytes]


def write_bundle(isa: str, bundle: Bundle, folder: Path = FOLDER) -> Path:
    """Write the bundle of the path named `isa`, and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{isa}.xz"
    write_atomically(path, lzma.compress(msgspec.msgpack.encode(bundle), preset=9))
    path.chmod(0o644)
    return path


@functools.cache
def read_bundle(isa: str, folder: Path = FOLDER) -> Bundle | None:
    """The bundle of the path named `isa`; None where there is none, or a damaged one."""
    try:
        content = lzma.decompress((folder / f"{isa}.xz").read_bytes())
        return msgspec.msgpack.decode(content, type=Bundle)
    except (OSError, lzma.LZMAError, EOFError, msgspec.MsgspecError):
        # Nothing is lost but time: what is missing is compiled.
        return None
