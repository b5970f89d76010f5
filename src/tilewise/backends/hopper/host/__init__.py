"""The host side of the Hopper backend.

A call: ``forward_call``, over pages ``paged_call`` and ``latent_call``, of selected keys ``selected_call`` and ``selected_gradients``, of
one query ``decoding_call``, and ``backward_call``, or ``padded_call``, decide once for a problem (``plan``) and make a launch's tensors
(``masks``: row ends and lists of blocks;
``portions``: the heads and keys of a launch that keeps dS); ``library`` finds the kernel's
file or has it built; ``driver`` launches it by its ``recipe``.

A kernel: ``aot`` compiles it, ``hostcode`` (with ``llvm_types`` and ``cubin``) reads the launch's recipe out of the compiled host function,
``sass`` and ``proven`` judge it, ``kernel_files`` writes it; ``compiler`` says whether the DSL is here, ``selection`` reads the words by
which users name kernels, and ``traits`` are those by which a sample stands for all.
"""
