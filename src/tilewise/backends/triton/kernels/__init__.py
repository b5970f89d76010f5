"""Triton's kernels and what they are made of; this package itself imports no Triton.

From the bottom up:

- ``maths``: the arithmetic of scores, where torch's differs from Triton's.
- ``arguments``: the bundles of arguments of all kernels, the tile scheduler, and launches that overlap.
- ``terms``: fp32 operands as sums of three bf16 terms.
- ``tile``: tiles of rows, how they are loaded, multiplied and stored.
- ``mask``: which tiles a program visits and which pairs of a tile count; dropout.
- ``forward``, ``backward``, ``pair_bias``, ``diagonals``, ``tangent``: the kernels; ``paged``: the forward over keys in pages;
  ``append``: what writes them.

``emit`` turns a problem's mask and score into functions that the kernels call; it alone can be imported without Triton.
"""
