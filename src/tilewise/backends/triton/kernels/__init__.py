"""Triton's kernels and what they are made of; this package itself imports no Triton.

``forward`` and ``backward`` hold the kernels, ``tile`` the parts that they share, ``maths`` the arithmetic of scores, and ``emit``
turns a problem's mask and score into functions that the kernels call. Only ``emit`` can be imported without Triton.
"""
