"""The host side of the Triton backend: from a problem and its tensors to launches of kernels. Nothing here imports Triton at import.

``launch`` holds the forward and the backward, each as a list of launches, which a plan makes once and runs in each call:

- ``plan``: what is decided once for a problem; ``facts``: the compile-time part of a launch.
- ``call``: the tensors of one call, by name, as kernels read them; ``descriptors``: tensor descriptors of them; ``terms``: fp32 as three
  bf16 terms; ``buffers``: what a call writes; ``leaf_sums``: the gradients of the tensors that a score reads.
- ``paged``: the launches over keys in pages; ``append``: the one that writes them.
- ``tangent``: the launches of forward mode and second derivatives; ``tile_map``: the launch that judges the tiles of a mask.
- ``runtime``: Triton itself, and a launch without its tensors. A compiled kernel is launched past Triton's look at each argument.

``tuned`` keeps the tiles that ``tilewise tune`` measured, ``compile_all`` is a program that compiles every configuration for GPUs that
need not be there, and ``machine_code`` finds faults in what it made.
"""
