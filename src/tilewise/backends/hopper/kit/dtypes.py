"""The number types of the kernels."""

from __future__ import annotations

import cutlass

F32, I32 = cutlass.Float32, cutlass.Int32
ELEMENT = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
"""The type of Q, K, V and O by :attr:`tilewise.backends.hopper.forward.config.Config.dtype`."""
