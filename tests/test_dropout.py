"""Dropout's random numbers, against Philox written a second time in plain Python integers."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tilewise import dropout

WORD = 2**32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    """Philox4x32 from its definition (Salmon et al. 2011, figure 2 and table 2)."""
    left1, right1, left2, right2 = counter  # two Feistel networks (L, R): (c0, c1) and (c2, c3) as (R, L) each
    for n in range(rounds):
        round_key = [(key[0] + n * 0x9E3779B9) % WORD, (key[1] + n * 0xBB67AE85) % WORD]
        high0, low0 = divmod(left1 * 0xD2511F53, WORD)
        high1, low1 = divmod(left2 * 0xCD9E8D57, WORD)
        left1, right1, left2, right2 = high1 ^ right1 ^ round_key[0], low1, high0 ^ right2 ^ round_key[1], low0
    return left1, right1, left2, right2


def pair_value(seed: int, head: int, i: int, j: int) -> int:
    """The 16-bit value of one pair, from DESIGN's words."""
    counter = (4 * (j // 16) + (j // 2) % 4, 8 * (i // 16) + i % 8, head, 0)
    unsigned = seed % 2**64
    word = philox(counter, (unsigned % WORD, unsigned // WORD), 7)[2 * (j % 2) + (i // 8) % 2]
    return word % 65536 if (j // 8) % 2 == 0 else word // 65536


SEEDS = {"zero": 0, "one": 1, "large": 2**63 - 1, "minus-one": -1, "smallest": -(2**63), "mixed": 0x123456789ABCDEF0}


# Random123 1.x, examples/kat_vectors: "philox4x32 7" and "philox4x32 10".
KNOWN = {
    7: {
        ((0,) * 4, (0,) * 2): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        ((WORD - 1,) * 4, (WORD - 1,) * 2): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A,
        ),
    },
    10: {
        ((0,) * 4, (0,) * 2): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((WORD - 1,) * 4, (WORD - 1,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("rounds", KNOWN)
def test_the_plain_python_philox_gives_the_known_answers(rounds):
    for (counter, key), words in KNOWN[rounds].items():
        assert philox(counter, key, rounds) == words


def test_philox_gives_the_known_answers():
    for (counter, (low, high)), words in KNOWN[7].items():
        seed = (high << 32) + low
        seed -= 2**64 if seed >= 2**63 else 0
        got = dropout.philox(tuple(torch.tensor(c) for c in counter), torch.tensor(seed))
        assert tuple(int(x) for x in got) == words


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_philox_is_the_plain_python_philox(seed):
    g = torch.Generator().manual_seed(seed % 1000)
    counters = torch.randint(0, WORD, (4, 50), generator=g)
    words = torch.stack(dropout.philox(tuple(counters), torch.tensor(seed)))
    key = (seed % 2**64 % WORD, seed % 2**64 // WORD)
    expected = [philox(tuple(c), key, 7) for c in counters.T.tolist()]
    assert [tuple(w) for w in words.T.tolist()] == expected


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((0, 33), (0, 35)),
        ((5, 22), (13, 40)),
        ((7, 8), (9, 10)),
        ((100_003, 100_020), (70_001, 70_019)),
        ((16, 32), (48, 64)),
    ],
    ids=["from-zero", "odd-offsets", "one-pair", "far", "one-block"],
)
def test_every_pair_has_the_value_of_the_counter_map(seed, rows, columns):
    p = 0.4
    heads = torch.tensor([[0, 1], [5, 70_000]])
    got = dropout.keep(torch.tensor([seed]), p, heads, rows, columns)
    threshold = round(0.6 * 65536)
    expected = [
        [[pair_value(seed, head, i, j) < threshold for j in range(*columns)] for i in range(*rows)]
        for head in heads.flatten().tolist()
    ]
    assert got.shape == (2, 2, rows[1] - rows[0], columns[1] - columns[0])
    assert torch.equal(got, torch.tensor(expected).view(got.shape))


def test_one_call_serves_the_eight_pairs_of_a_thread():
    """The pairs {i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9} share a counter, and no other pair of the head has it."""
    counter = lambda i, j: (4 * (j // 16) + (j // 2) % 4, 8 * (i // 16) + i % 8)  # noqa: E731
    groups: dict[tuple[int, int], set] = {}
    for i in range(48):
        for j in range(48):
            groups.setdefault(counter(i, j), set()).add((i, j))
    for pairs in groups.values():
        i, j = min(pairs)
        assert pairs == {(r, c) for r in (i, i ^ 8) for c in (j, j ^ 1, j ^ 8, j ^ 9)}


def test_the_values_of_a_block_are_all_different_words():
    taken = {(j // 2 % 4, i % 8, 2 * (j % 2) + (i // 8) % 2, (j // 8) % 2) for i in range(16) for j in range(16)}
    assert len(taken) == 256


@pytest.mark.parametrize("tile", [1, 5, 16, 24])
def test_a_pairs_value_depends_on_no_tile(tile):
    seed, heads = torch.tensor([42]), torch.tensor([3])
    whole = dropout.keep(seed, 0.5, heads, (0, 50), (0, 61))
    for i in range(0, 50, tile):
        for j in range(0, 61, tile):
            rows, columns = (i, min(i + tile, 50)), (j, min(j + tile, 61))
            assert torch.equal(dropout.keep(seed, 0.5, heads, rows, columns), whole[:, slice(*rows), slice(*columns)])


def test_an_empty_range_has_no_pairs():
    seed, heads = torch.tensor([42]), torch.tensor([[0, 1], [2, 3]])
    assert dropout.keep(seed, 0.5, heads, (0, 0), (0, 5)).shape == (2, 2, 0, 5)
    assert dropout.keep(seed, 0.5, heads, (3, 7), (16, 16)).shape == (2, 2, 4, 0)
    assert dropout.keep(seed, 0.5, heads[:0], (0, 4), (0, 5)).shape == (0, 2, 4, 5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_p(p):
    kept = tw.dropout_mask(7, p, 2, 4, 256, 256).double().mean(dim=(-1, -2))
    sigma = (p * (1 - p)) ** 0.5 / 256
    assert bool(((kept - (1 - p)).abs() < 5 * sigma).all())


@pytest.mark.parametrize("lag", [(0, 1), (1, 0), (8, 0), (0, 8), (0, 16), (16, 0), (1, 1)], ids=str)
def test_neighbouring_pairs_are_independent(lag):
    kept = tw.dropout_mask(11, 0.5, 1, 1, 512, 512)[0, 0].double() * 2 - 1
    a, b = kept[lag[0] :, lag[1] :], kept[: 512 - lag[0], : 512 - lag[1]]
    assert abs((a * b).mean().item()) < 5 / 512


def test_heads_and_seeds_have_different_masks():
    masks = [tw.dropout_mask(seed, 0.5, 2, 2, 64, 64).flatten(0, 1) for seed in (0, 1, -1, 2**32, 2**62)]
    for n, a in enumerate(torch.cat(masks)):
        for b in torch.cat(masks)[n + 1 :]:
            assert 0.4 < (a == b).double().mean() < 0.6


@pytest.mark.parametrize(
    ("p", "threshold"),
    [(0.5, 32768), (0.1, 58982), (0.9, 6554), (1 / 65536, 65535), (65535 / 65536, 1), (1 / 3, 43691)],
    ids=["half", "tenth", "nine-tenths", "least", "most", "third"],
)
def test_the_threshold_is_rounded_and_the_scale_is_its_inverse(p, threshold):
    assert dropout.threshold(p) == threshold
    assert dropout.keep_scale(p) * threshold == 65536


def test_kept_values_are_below_the_threshold_and_nothing_else_matters():
    values = torch.tensor([[pair_value(9, 0, i, j) for j in range(24)] for i in range(24)])
    for p in (1 / 65536, 0.25, 0.75):
        assert torch.equal(tw.dropout_mask(9, p, 1, 1, 24, 24)[0, 0], values < dropout.threshold(p))


def test_the_mask_shown_is_numbered_by_batch_and_head():
    shown = tw.dropout_mask(5, 0.5, 3, 2, 20, 30)
    for b in range(3):
        for h in range(2):
            heads = torch.tensor(2 * b + h)
            assert torch.equal(shown[b, h], dropout.keep(torch.tensor([5]), 0.5, heads, (0, 20), (0, 30)))


def test_a_seed_may_be_an_int_or_a_tensor():
    for seed in SEEDS.values():
        by_tensor = tw.dropout_mask(torch.tensor([seed]), 0.5, 1, 2, 17, 17)
        assert torch.equal(tw.dropout_mask(seed, 0.5, 1, 2, 17, 17), by_tensor)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_attention_drops_the_pairs_that_the_mask_shows(backend):
    q, k = torch.randn(2, 2, 19, 3, 8, dtype=torch.float64)
    v = torch.eye(19, dtype=torch.float64).view(1, 19, 1, 19).expand(2, 19, 3, 19)  # o is P after dropout
    p = 0.3
    whole = tw.attention(q, k, v, backend=backend)
    dropped = tw.attention(q, k, v, dropout_p=p, dropout_seed=-77, backend=backend)
    kept = tw.dropout_mask(-77, p, 2, 3, 19, 19).transpose(1, 2)
    torch.testing.assert_close(dropped, whole * kept * dropout.keep_scale(p))


def test_without_a_seed_each_call_draws_its_own_from_torchs_generator():
    q = torch.randn(1, 20, 2, 8)
    torch.manual_seed(3)
    first, second = (tw.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    again = tw.attention(q, q, q, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [1.0, 1e-6, 1 - 1e-6, -0.1, 1.5, float("nan")], ids=str)
def test_a_probability_that_keeps_all_or_nothing_is_a_value_error(p):
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="dropout_p"):
        tw.attention(q, q, q, dropout_p=p)


@pytest.mark.parametrize(
    "seed", [torch.zeros(2).long(), torch.zeros(1), torch.zeros(1).int()], ids=["two", "float", "int32"]
)
def test_a_seed_that_is_not_one_int64_is_a_value_error(seed):
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="dropout_seed must be one int64"):
        tw.attention(q, q, q, dropout_p=0.5, dropout_seed=seed)


def test_a_seed_of_more_than_64_bits_is_a_value_error():
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="dropout_seed"):
        tw.attention(q, q, q, dropout_p=0.5, dropout_seed=2**64)
