"""The counts of a launch, set to zero by a kernel before it.

The other kernel begins beside this one, and waits for its end before it counts, when this one is long over. So a launch needs no memory
that outlives it, on which a second stream or a second graph might count.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import I32

THREADS = 256


@cute.kernel
def kernel(counts: cute.Tensor):
    cute.arch.griddepcontrol_launch_dependents()
    n = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if n < cute.size(counts):
        counts[n] = I32(0)


@cute.jit
def launch(counts: cute.Tensor, stream: cuda.CUstream, config: cutlass.Constexpr):
    """Before the kernel that counts, in the same stream."""
    kernel.set_name_prefix(f"{config.name}_reset", remove_cutlass_symbol=True, keep_mangled_name=False)
    ctas = (cute.size(counts) + THREADS - 1) // THREADS
    kernel(counts).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream)
