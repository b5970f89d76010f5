"""Quotients, rests, powers and roots are worth what eager PyTorch makes of them in fp32, at the ends of its range too, on every backend.

A score hides each pair whose value is not eager's, sign of zero and all, so that the output shows them one by one.
"""

import itertools
import math

import pytest
import torch

import tilewise as tw
from tilewise.backends.triton import interpreting

KEYS = 64
ZEROS, LARGEST, SMALLEST = (0.0, -0.0), 3.4028235e38, 1e-45
NUMBERS = (1.0, -1.0, 3.0, -3.0, 0.7, -0.7, 41.0, 1e-20, 1e10, -1e10, 5e15, 2e17, LARGEST, -2e38, 1.1754944e-38)
ENDS = (*ZEROS, *NUMBERS, 1e-40, -SMALLEST, math.inf, -math.inf, math.nan)
POWERS = (
    *ZEROS, 1.0, -1.0, 2.0, 3.0, -3.0, 5.0, -7.0, 126.0, 0.5, -0.5, 2.5, -1.7, 1e10, math.inf, -math.inf, math.nan,
)  # fmt: skip
BASES = (
    *ZEROS, 1.0, -1.0, 2.0, -2.0, 0.3, -1.3, 1.0000001, 1e-20, -1e-20, 1e30, 1e-40, LARGEST, math.inf, -math.inf, math.nan,
)  # fmt: skip
EXACT = 2.0**80  # rests and quotients are exact below it
OF_PAIRS = {
    "rest": (lambda x, y: x % y, ENDS, ENDS),
    "quotient rounded down": (lambda x, y: x // y, ENDS, ENDS),
    "fmod": (torch.fmod, ENDS, ENDS),
    "quotient": (lambda x, y: x / y, ENDS, ENDS),
    "quotient of a number": (lambda x, y: 1 / x + 0 * y, ENDS, (1.0,)),
    "quotient, then floor": (
        lambda x, y: torch.floor(x / y),
        tuple(map(float, range(0, 500, 5))),
        (1.0, 3.0, 41.0, -7.0),
    ),
    "power": (lambda x, y: x**y, BASES, POWERS),
    "square": (lambda x, y: x**2, BASES, (0.0,)),
    "cube": (lambda x, y: x**3, BASES, (0.0,)),
    "power of a half": (lambda x, y: x**0.5, BASES, (0.0,)),
    "inverse square": (lambda x, y: x**-2, BASES, (0.0,)),
    "root": (lambda x, y: torch.sqrt(x), ENDS, (0.0,)),
    "inverse root": (lambda x, y: torch.rsqrt(x), ENDS, (0.0,)),
    "negative": (lambda x, y: -x, ENDS, (0.0,)),
    "round": (lambda x, y: torch.round(x), (*ENDS, 0.3, -0.3, 0.5, -0.5, 1.5, -2.5, 8388607.5), (0.0,)),
    "trunc": (lambda x, y: torch.trunc(x), (*ENDS, 0.3, -0.3), (0.0,)),
}
INTERPRETED = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
BACKENDS = ("cpu", "portable", "reference", pytest.param("triton", marks=INTERPRETED))


def pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of a case's operands, (heads, KEYS) each."""
    _, xs, ys = OF_PAIRS[name]
    found = torch.tensor([(x, y) for x, y in itertools.product(xs, ys)])
    ratio = (found[:, 0].double() / found[:, 1].double()).abs()
    if name in ("rest", "quotient rounded down", "fmod"):
        found = found[~(ratio.isfinite() & (ratio >= EXACT))]
    spare = -len(found) % KEYS
    return torch.cat([found, torch.ones(spare, 2)]).T.reshape(2, -1, KEYS)


def is_worth(found, wanted):
    """Whether a value is another to 4 ulp: a NaN where that is one, and a zero of its sign."""
    near = (found - wanted).abs() <= wanted.abs() * 2**-21 + 2 * SMALLEST
    return torch.where(
        wanted == 0, 1 / found == 1 / wanted, near | (found == wanted) | ((found != found) & (wanted != wanted))
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OF_PAIRS)
def test_an_operation_of_fp32_is_worth_what_eager_pytorch_makes_of_it(name, backend):
    function, (x, y) = OF_PAIRS[name][0], pairs(name)
    wanted = function(x, y)
    q, k = torch.zeros(1, 1, len(x), 16), torch.zeros(1, KEYS, len(x), 16)
    v = torch.eye(KEYS)[None, :, None].expand(1, -1, len(x), -1)
    score = lambda s, b, h, i, j: torch.where(is_worth(function(x[h, j], y[h, j]), wanted[h, j]), s, -math.inf)  # noqa: E731
    o = tw.attention(q, k, v, score=score, backend=backend)
    wrong = o[0, 0] == 0
    assert not wrong.any(), torch.stack([x[wrong], y[wrong], wanted[wrong]], 1).tolist()
