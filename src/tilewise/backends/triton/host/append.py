"""The launch that writes new keys and values into the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.backends.base import Pages
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.paged import scale_strides
from tilewise.backends.triton.host.plan import in_units, operand_strides
from tilewise.backends.triton.tiles import Tiles

PROGRAM = Tiles(1, 1, 4, 3)  # each writes a row of all heads


@dataclass(eq=False)
class AppendLaunch(runtime.Launch):
    """The launch for tensors of the same shapes, strides and dtypes (docs/decisions.md#repeated-calls).

    Attributes:
        sizes: as the kernel takes them (:func:`runtime.opaque`). constants: behind them.
    """

    sizes: Any
    constants: tuple[int | bool, ...]

    @classmethod
    def of(cls, cache: Pages, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> AppendLaunch:
        """The launch for k and v ``(batch, rows, heads, head_dim)``, or packed, with unit last strides.

        ``cache``: as :class:`tilewise.PagedCache`, or :class:`tilewise.QuantizedCache`.
        """
        k_pages, v_pages, block_table, seqlens_k, *scales = cache
        (num_pages, page_size), (batch, max_pages) = k_pages.shape[:2], block_table.shape
        named = (("k_pages", k_pages), ("v_pages", None if v is None else v_pages), ("k", k), ("v", v))
        strides = {name: (0, 0, 0) if x is None else operand_strides(x) for name, x in named}
        unit, strides = in_units(strides, 16 // k.element_size())
        kernels = runtime.kernels()
        sizes = kernels.AppendSizes(
            batch=batch,
            new=k.shape[1],
            num_pages=num_pages,
            page_size=page_size,
            max_pages=max_pages,
            table=block_table.stride(),
            length=seqlens_k.stride(0),
            **strides,
            **{name: scale_strides(x) for name, x in zip(("k_scale", "v_scale"), scales, strict=False)},
        )
        rows = k.shape[0] * (k.shape[1] if cu_seqlens_q is None else 1)
        each = [x.ndim == 3 for x in scales] or [False, False]
        constants = *k.shape[-2:], 0 if v is None else v.shape[-1], unit, *each
        return cls(kernels.append, (rows, 1, 1), PROGRAM, runtime.opaque(sizes), constants)

    def __call__(self, cache: Pages, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
        """Writes k and v behind the keys of each sequence."""
        k_pages, v_pages, block_table, seqlens_k, *scales = cache
        tensors = k_pages, None if v is None else v_pages, k, v, block_table, seqlens_k, cu_seqlens_q, *scales
        at, places = [None if x is None else x.data_ptr() for x in tensors], 0
        for address in at:
            places |= address or 0
        if self.compiled is not None and places % 16 == 0 and runtime.current() == k.device.index:
            at += [None] * (9 - len(at))
            runtime.run_each([(self.compiled, self.grid, (tuple(at), self.sizes, *self.constants))])
            return
        pools = [x.view(torch.uint8) if scales and x is not None else x for x in tensors[:2]]
        bundle = runtime.kernels().AppendTensors(*pools, *tensors[2:])
        with runtime.on_device(k):
            self.start(places % 16 == 0, bundle, self.sizes, *self.constants)
