"""The pairs that dropout keeps: Philox4x32-7 (Salmon et al. 2011) over global indices (docs/algorithm.md#9-dropout).

Pair ``(i, j)`` of head ``(b, h)`` is kept iff its 16-bit value is below ``threshold(p)``. One call gives eight values,
those of ``{i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9}``: what one thread holds of S in a tensor-core accumulator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDS = 7
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Return ``round((1 - p) * 65536)``: 16-bit values below it are kept."""
    return round((1 - p) * 65536)


def possible(p: float) -> bool:
    """Return whether p leaves some 16-bit values kept and some dropped."""
    return math.isfinite(p) and 0 < threshold(p) < 65536


def keep_scale(p: float) -> float:
    """Return the factor of kept values, ``65536 / threshold(p)``: the inverse of the share that is really kept."""
    return 65536 / threshold(p)


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, one int64, by the device's generator. The host never reads it, so graphs and checkpoints repeat it."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def seed_tensor(seed: int, device: torch.device | str | None) -> Tensor:
    """Return one int64 with the 64 bits of ``seed``, an int of -2^63 ... 2^64 - 1."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7: four 32-bit words from a 128-bit counter and a 64-bit key, all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1  # 32 x 32 bits: int64 wraps, its bits are right
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def keep(seed: Tensor, p: float, head: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Return the pairs of a tile that are kept.

    Args:
        seed: int64, one element.
        head: int64 ``b * heads_q + h`` of each head, any shape.
        rows, columns: half-open global ranges of i and j within the sequence.

    Returns:
        bool, ``head.shape + (rows, columns)``.
    """
    i0, j0 = rows[0] // 16, columns[0] // 16
    tiles_i, tiles_j = -(-rows[1] // 16) - i0, -(-columns[1] // 16) - j0
    c1 = torch.arange(8 * i0, 8 * (i0 + tiles_i), device=head.device).view(-1, 1)  # 8 * (i // 16) + i % 8
    c0 = torch.arange(4 * j0, 4 * (j0 + tiles_j), device=head.device).view(1, -1)  # 4 * (j // 16) + (j // 2) % 4
    c2 = head.unsqueeze(-1).unsqueeze(-1)
    words = torch.stack(torch.broadcast_tensors(*philox((c0, c1, c2, torch.zeros_like(c2)), seed.view(()))))
    halves = torch.stack([words & 0xFFFF, words >> 16])
    # halves: (j // 8 % 2, [j % 2, i // 8 % 2], head..., [i // 16, i % 8], [j // 16, j // 2 % 4])
    values = halves.view(2, 2, 2, head.numel(), tiles_i, 8, tiles_j, 4).permute(3, 4, 2, 5, 6, 0, 7, 1)
    whole = (values < threshold(p)).reshape(*head.shape, 16 * tiles_i, 16 * tiles_j)
    return whole[..., rows[0] - 16 * i0 : rows[1] - 16 * i0, columns[0] - 16 * j0 : columns[1] - 16 * j0]
