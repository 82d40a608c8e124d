"""How the KV cache lies in memory for the CPU kernels.

Tokens are stored in cells of 16 (a block is one cell or several), cells in chunks of 32: memory is
[chunk][layer] [KV head][32 cells], so that a head's tokens lie in order where a sequence's blocks
do, and that memory is touched chunk by chunk as the cache fills. A cell of one layer and head is:

    keys     uint8 [head_dim / 4][16 tokens][4], stored + 128, so that 4 dimensions of 16 tokens are
             one vector
    scales   float32 [16]: the largest magnitude of each token's key, divided by 127; where values
             are int8, [16] more for them
    values   [8 pairs of tokens][head_dim][2], so that two tokens' values are one pair of a bfloat16
             dot: int8 where the cache is asked for in int8, else bfloat16 where the processor
             multiplies it, float16 elsewhere

Attention multiplies keys in the form that they are kept in: more bits would be read and not used.
"""

from __future__ import annotations

CELL_TOKENS = 16
CHUNK_CELLS = 32
# Values are kept in 16 bits ("auto") or 8; keys are int8 in both.
KV_CACHE_DTYPES = ("auto", "int8")
# Attention sums over this number of KV tokens at a time. Tiles begin at absolute positions.
TILE_TOKENS = 128
CELLS_PER_TILE = TILE_TOKENS // CELL_TOKENS
PLACES_BYTES_PER_TILE = 8 * 3 * CELLS_PER_TILE
UNIT_INTS = 8
MERGE_INTS = 6
# What becomes of a unit's results: it has all tiles of its rows and writes their output; it leaves
# the rows' states for other units; it begins with such states; or it leaves partial results for the
# merge, whose number is added to the last of these.
WHOLE = 0
LEAVES_STATE = 1
BEGINS_WITH_STATE = 2
LEAVES_PARTIALS = 3
# A row's state of one head, beside its weighted values: maximum and sum, float32.
STATE_BYTES = 8
# In prefill, this number of rows (tokens x heads of a group) shares a converted KV tile.
MAX_QUERY_ROWS = 192
# The maxima of a row block are one vector, its sums another: no block has more rows.
STATS_LANES = 16


def key_bytes(head_dim: int) -> int:
    """Bytes of one cell's keys of one head."""
    return CELL_TOKENS * head_dim


def scale_bytes(dtype: str) -> int:
    """Bytes of one cell's scales of one head."""
    return 4 * CELL_TOKENS * (2 if dtype == "int8" else 1)


def value_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one cell's values of one head."""
    return CELL_TOKENS * head_dim * (1 if dtype == "int8" else 2)


def spread_size(head_dim: int) -> int:
    """Dimensions that the Hadamard transform mixes: the largest power of two that divides."""
    return head_dim & -head_dim


def chunk_cells(num_layers: int, num_kv_heads: int) -> int:
    """Cells of one chunk, over all layers and heads."""
    return num_layers * num_kv_heads * CHUNK_CELLS


def query_tile_tokens(group: int) -> int:
    """Prompt tokens of one prefill tile, for `group` query heads on a KV head."""
    return max(1, MAX_QUERY_ROWS // group)


def decode_rows(group: int) -> int:
    """Rows of decode's register tile: a group's heads in as few equal tiles as fit."""
    tiles = -(-group // 6)
    return -(-group // tiles)


def padded_group(group: int) -> int:
    """Heads of a group rounded up to whole register tiles of decode."""
    return -(-group // decode_rows(group)) * decode_rows(group)


def attention_scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch memory one thread needs; see `scratch_areas`."""
    return scratch_areas(head_dim, group)["end"]


def scratch_areas(head_dim: int, group: int) -> dict[str, int]:
    """Byte offset of each area of a thread's scratch memory."""
    rows = query_tile_tokens(group) * group + STATS_LANES
    sizes = {
        "places": 2
        # addresses of the cells' keys, scales and values: this tile's and the next's
        * PLACES_BYTES_PER_TILE,
        "values": 4 * TILE_TOKENS * head_dim,  # widened, where values are not used in place
        "scores": 4 * TILE_TOKENS * STATS_LANES,
        "weights": 4 * TILE_TOKENS * STATS_LANES,  # softmax numerators, bfloat16 or float32
        "products": 4 * STATS_LANES * head_dim,  # a matrix tile's weighted values
        "shapes": 64,  # of matrix tiles
        "tile_stats": 4
        * STATS_LANES
        * 4,  # of the row block: maximum, sum, and the two factors of the merge
        "queries": rows * head_dim,  # int8
        "query_scales": 4 * rows,
        "query_sums": 4 * rows,
        "maxima": 4 * STATS_LANES * rows,
        "sums": 4 * STATS_LANES * rows,
        "out": 4 * rows * head_dim,
    }
    areas = {}
    at = 0
    for name, size in sizes.items():
        areas[name] = at
        at += -(-size // 64) * 64
    return {**areas, "end": at}
