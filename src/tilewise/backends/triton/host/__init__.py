"""The host side of the Triton backend: from a problem and its tensors to launches of kernels. Nothing here imports Triton at import.

``launch`` holds the forward and the backward, each as a list of passes. A first call goes through these files, from top to bottom:

- ``plan``: what is decided once for a problem; ``facts``: the compile-time part of a launch.
- ``call``: the tensors of one call, as kernels read them; ``descriptors``: tensor descriptors of them; ``terms``: fp32 as three bf16
  terms; ``buffers``: what a call writes; ``leaf_sums``: the gradients of the tensors that a score reads.
- ``paged``: the launches over keys in pages; ``append``: the one that writes them.
- ``tangent``: the launches of forward mode and second derivatives; ``tile_map``: the launch that judges the tiles of a mask.
- ``launched``: one launch and what of it is the same in every call; ``runtime``: Triton itself.

Later calls of the same problem go from ``launch`` to ``relaunch``, which gives the launches of the first call new addresses, and from
there to ``driver``, which hands them to NVIDIA's driver. ``tuned`` keeps the tiles that ``tilewise tune`` measured, and
``compile_all`` is a program that compiles every configuration for GPUs that need not be there, and ``machine_code`` finds faults in
what it made.
"""
