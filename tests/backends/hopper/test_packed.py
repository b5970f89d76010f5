"""Lookups among packed sequences, on the emulated machine (:mod:`tests.backends.hopper.emulated`)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.backends.hopper import emulated


@pytest.fixture
def packed():
    (module,) = emulated.imported("kit.packed")
    emulated.role.threads = 128
    return module


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 100, 1500])
def test_every_tile_is_found_in_its_sequence(packed, count):
    chance = random.Random(count)
    tiles = np.array([chance.choice((0, 0, 1, 2, 40)) for _ in range(count)])
    expected = [(n, block) for n in range(count) for block in range(tiles[n])]
    for m in chance.sample(range(len(expected)), min(len(expected), 40)):
        assert packed.find(m, lambda n: tiles[n], count) == (*expected[m], len(expected))
    assert packed.find(len(expected), lambda n: tiles[n], count)[2] == len(expected)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_every_tile_is_found_once_and_those_of_larger_sequences_first(packed, count):
    chance = random.Random(count)
    tiles, sizes = (np.array([chance.choice((0, 1, 2, 40)) for _ in range(count)]) for _ in range(2))
    order = sorted(range(count), key=lambda n: -sizes[n])  # stable: equal ones in their order
    expected = [(n, tile) for n in order for tile in range(tiles[n])]
    for m in chance.sample(range(len(expected)), min(len(expected), 30)):
        assert packed.find_by_size(m, lambda n: (tiles[n], sizes[n]), count) == expected[m]
    assert packed.find_by_size(len(expected), lambda n: (tiles[n], sizes[n]), count)[0] == -1


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100, 1024, 1025, 5000])
def test_the_holder_of_a_place_is_the_last_sequence_that_starts_no_later(packed, count):
    chance = random.Random(count)
    starts = np.cumsum([0] + [chance.choice((1, 2, 9)) for _ in range(count - 1)])
    for place in {0, 1, 5, *(int(x) + d for x in chance.sample(list(starts), min(count, 20)) for d in (0, 1))}:
        expected = max(n for n in range(count) if starts[n] <= place)
        assert packed.holder(place, lambda n: starts[n], count) == expected
