"""The sum of what parts of a group of query heads leave, where several programs share a key tile (``backends.triton.group_parts``)."""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import begin_overlap, plain_sizes


@triton.jit
def keys_of_all(sizes, FACTS: tl.constexpr):
    """The keys of all batch elements, int64."""
    keys = tl.cast(sizes.seqlen_k, tl.int64)
    return keys if FACTS.packed else keys * sizes.batch


@triton.jit
def group_parts_kernel(tensors, sizes, scales, dk, dv, FACTS: tl.constexpr):
    """dK and dV: the sums of ``tensors.dk`` and ``tensors.dv`` over the parts, in order. Grid: (blocks of elements,).

    Args:
        dk, dv: the gradients, as in the public call. The parts' sums are fp32, (group_parts, *) of these.
    """
    sizes = plain_sizes(sizes)
    begin_overlap(FACTS)
    # Partner: the passes over key tiles; the grid is as large as the larger of both gradients asks.
    rows = keys_of_all(sizes, FACTS) * sizes.heads_k
    _add_up(tensors.dk, dk, rows * sizes.dims[0], sizes, FACTS)
    _add_up(tensors.dv, dv, rows * sizes.dims[1], sizes, FACTS)


@triton.jit
def _add_up(parts, total, count, sizes, FACTS: tl.constexpr):
    """Stores this program's block of the ``count`` elements of ``total``."""
    BLOCK: tl.constexpr = FACTS.tile_m * FACTS.tile_n
    n = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.full([BLOCK], 0.0, tl.float32)
    for part in range(sizes.group_parts):
        # A block of one part: fp32 (BLOCK,), from where the pass over key tiles left it, most of it in L2.
        acc += tl.load(parts + part * count + n, mask=n < count, other=0.0)
    tl.store(total + n, acc.to(total.dtype.element_ty), mask=n < count)
