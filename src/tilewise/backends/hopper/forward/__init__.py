"""O and lse on Hopper (sm_90a); the mathematics is docs/algorithm.md#4-forward. To change one thing, edit one file:

=================================================== ==================================================================
tile sizes, registers                               a row of TABLE in tiles (no DSL)
which kernel a call gets                            config (no DSL); over pages paged_config, of selected keys selected
what no kernel computes                             reasons (no DSL)
roles, barriers and who waits for whom              kernel: its docstring and ``kernel``; the launch
how many CTAs, how many heads are at work           grids (no DSL)
which tile a CTA computes, which blocks it visits   query_tiles
shared memory and barriers                          storage
who loads Q, K, V and a bias by pair                load; parts of key blocks from the pages of a cache: pages
who gathers the rows that queries selected          gather; the lists of these: kit/lists
the blocks of a tile, masks and softmax             compute
the products of a block                             staged_blocks; whose turn it is: turns
o and lse to memory                                 epilogue
states of split keys                                combine; of segments in one order: segments
the numbers and tensors of a launch                 parameters (no DSL); by name in kernels: params
=================================================== ==================================================================
"""
