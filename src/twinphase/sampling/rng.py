"""Counter-based random numbers: a draw is a function of (seed, position) only.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). No state,
so batch, chunking and order of requests do not change a draw. Plain integers: one draw per token
needs no arrays.
"""

from __future__ import annotations

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
# golden ratio, sqrt(3) - 1
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF

# The third word of the counter keeps uses apart.
_STREAM_TOKEN = 0
_STREAM_SEED = 1


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four random words of 32 bits for a counter of four and a key of two words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> 32) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1), with 53 random bits, for the token at `position` of a sequence.

    Args:
        seed: non-negative; seeds that are equal modulo 2^64 are the same.
        position: absolute position of the token that is drawn, prompt included.
    """
    word_0, word_1, _, _ = philox4x32(
        (position & _MASK, position >> 32 & _MASK, _STREAM_TOKEN, 0), _key(seed)
    )
    return ((word_0 << 32 | word_1) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The 64-bit seed of the `index`-th request without its own, from the engine's seed."""
    word_0, word_1, _, _ = philox4x32(
        (index & _MASK, index >> 32 & _MASK, _STREAM_SEED, 0), _key(seed)
    )
    return word_0 << 32 | word_1


def _key(seed: int) -> tuple[int, int]:
    return seed & _MASK, seed >> 32 & _MASK
