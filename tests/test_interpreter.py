"""The interpreter that tests run Triton's kernels in computes what it does without our shortening of its work."""

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl

from tilewise.backends.triton import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")


@triton.jit
def twice(x):
    return x + x


@triton.jit
def kernel(x_ptr, o_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(o_ptr + offsets, twice(twice(tl.load(x_ptr + offsets))) + tl.sum(tl.zeros((N,), tl.int32), 0))


@triton.jit
def some(x_ptr, o_ptr, end, N: tl.constexpr):
    offsets = tl.arange(0, N)
    mask = (offsets < N) & (tl.program_id(0) < end)
    tl.store(o_ptr + tl.program_id(0) * N + offsets, tl.load(x_ptr + offsets, mask=mask, other=7), mask=mask)


def test_a_scalar_comparison_is_a_mask():
    x, o = torch.arange(4), torch.full((3, 4), -1)
    some[(3,)](x, o, 2, 4)
    assert o.tolist() == [[0, 1, 2, 3]] * 2 + [[-1] * 4]


def test_functions_of_a_kernel_run_and_the_language_is_itself_again_after_a_launch():
    from triton.runtime import interpreter

    assert interpreter.quickened
    assert not interpreter.interpreter_builder.options.debug  # else sums of integers would be held to their range
    load, x = tl.load, torch.tensor([1, -2, 1 << 29, 7], dtype=torch.int32)
    for _ in range(2):
        o = torch.empty_like(x)
        kernel[(1,)](x, o, 4)
        assert o.tolist() == [4, -8, -(1 << 31), 28]  # 2^31 wraps, as on a GPU
        assert tl.load is load
        assert tl.core.is_builtin(load)
