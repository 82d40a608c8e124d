import numpy as np
import pytest

from twinphase.sampling.rng import derive_seed, philox4x32, uniform


# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter, key, expected):
    def words(text):
        return tuple(int(word, 16) for word in text.split())

    assert philox4x32(words(counter), words(key)) == words(expected)


def test_draws_are_uniform_and_independent_of_their_neighbours():
    draws = np.array([[uniform(seed, position) for position in range(400)] for seed in range(50)])
    assert draws.min() >= 0 and draws.max() < 1
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    expected = draws.size / 20
    assert (
        np.sum((counts - expected) ** 2 / expected) < 43.8
    )  # chi-squared, 19 degrees of freedom, p = 0.001
    for a, b in ((draws[:, 1:], draws[:, :-1]), (draws[1:], draws[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


def test_a_draw_depends_on_seed_and_position_only():
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert uniform(2**64 + 3, 5) == uniform(3, 5)


def test_derived_seeds_differ_from_each_other_and_between_engines():
    seeds = {derive_seed(engine, index) for engine in range(10) for index in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
