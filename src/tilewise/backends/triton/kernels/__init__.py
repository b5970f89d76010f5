"""Triton's kernels and what they are made of; this package itself imports no Triton.

From the bottom up:

- ``maths``: the arithmetic of scores, where torch's differs from Triton's.
- ``arguments``: the bundles of arguments of all kernels, the tile scheduler, and launches that overlap.
- ``terms``: fp32 operands as sums of three bf16 terms.
- ``e4m3``: numbers of 8 bits, read two at a time and written.
- ``tile``: tiles of rows, how they are loaded, multiplied and stored.
- ``mask``: which tiles a program visits and which pairs of a tile count; dropout.
- ``tile_map``: which tiles of a mask are empty, partial or full, before any kernel visits them; ``tile_lists``: their lists;
  ``tile_bits``: a bit for each pair of the partial ones.
- ``forward``, ``backward``, ``pair_bias``, ``diagonals``, ``tangent``: the kernels; ``tangent_tiles``: what the last one loads;
  ``paged``: the forward over keys in pages, ``paged_loads``: what it loads, ``paged_epilogue``: its end,
  ``merge_rows``: of its split keys; ``append``: what writes them;
  ``group_parts``: the sums of dK and dV where a key tile has several programs; ``sum_rows``: those of a query's rows in a gathered call.

``emit`` turns a problem's mask and score into functions that the kernels call: ``writer`` writes an expression, ``factors`` collects its
factors, ``leaf_reads`` says how it reads its tensors, and ``distant`` how those at the distance of a pair. These five can be imported
without Triton.
"""
