"""Tiles of the linear kernel's programs: a table that ships, and results of `twinphase tune`.

No sum depends on it: a row's products are added 32 inputs after 32, however many rows and outputs a
program has, as long as the same unit multiplies them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from twinphase.weights.storage import cache_root, write_atomically

LOG = logging.getLogger(__name__)
# Up to this many rows reading the weights dominates, which many small programs do fastest.
FEW = 64


class Tile(NamedTuple):
    """Rows and outputs of one program, and its warps and stages."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


# By whether there are few rows, and by compute capability: the last entry that is not above the
# device's.
_SHIPPED = json.loads(Path(__file__).with_name("tiles.json").read_text())
TILES: dict[bool, dict[int, Tile]] = {
    few: {int(capability): Tile(*values) for capability, values in _SHIPPED[name].items()}
    for few, name in ((True, "few"), (False, "many"))
}
# Where even tiles of this size keep every multiprocessor busy; None where none is faster.
LARGEST: dict[int, Tile | None] = {
    int(capability): values and Tile(*values) for capability, values in _SHIPPED["most"].items()
}
MULTIPROCESSORS = 132
# Tiles of this process's device by `key_of`; a backend sets them before its first step.
tuned: Mapping[str, Tile] = {}


def tile_of(table: dict[int, Any], capability: int) -> Any:
    """The entry for a compute capability, such as 90."""
    return table[max(known for known in table if known <= capability)]


def key_of(few: bool, bits: int, outputs: int, inputs: int) -> str:
    """The name of a shape in the tuned table."""
    return f"{'few' if few else 'many'} {bits} {outputs}x{inputs}"


def tile_for(few: bool, bits: int, outputs: int, inputs: int, capability: int) -> Tile:
    """The tuned tile of a shape, else the shipped one of the capability."""
    found: Tile = tuned.get(key_of(few, bits, outputs, inputs)) or tile_of(TILES[few], capability)
    return found


def tile_for_rows(rows: int, bits: int, outputs: int, inputs: int, capability: int) -> Tile:
    """The tile of a product with this many rows."""
    largest: Tile | None = tile_of(LARGEST, capability)
    if largest is not None:
        programs = -(-rows // largest.rows) * -(-outputs // largest.outputs)
        if rows > FEW and programs >= MULTIPROCESSORS:
            return largest
    return tile_for(rows <= FEW, bits, outputs, inputs, capability)


def rows_of_program(rows: int, tile: Tile) -> int:
    """How many of `rows` a program has: all of a few, a power of two."""
    return max(tile.rows, 1 << (rows - 1).bit_length()) if rows <= FEW else tile.rows


def tuned_path(device: str) -> Path:
    """The file of tuned tiles for a device of this name."""
    return cache_root() / "tuned" / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read_tuned(device: str) -> dict[str, Tile]:
    """Tuned tiles of a device; empty if it was never tuned or its file is damaged."""
    path = tuned_path(device)
    try:
        return {
            key: Tile(*map(int, values)) for key, values in json.loads(path.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        LOG.warning(
            "%s is not readable: the shipped tiles are used. Run `twinphase tune` again.", path
        )
        return {}


def keep_tuned(device: str, found: Mapping[str, Tile]) -> Path:
    """Add to the tuned tiles of a device; returns the file."""
    path = tuned_path(device)
    write_atomically(path, json.dumps({**read_tuned(device), **found}, indent=0).encode())
    return path
