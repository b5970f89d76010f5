"""dQ, dK and dV on Hopper (sm_90a); the mathematics is docs/algorithm.md#6-backward.

Which kernels run is one record, :class:`~tilewise.backends.hopper.backward.config.Backward`, chosen by ``config.choose``. They run in
one of these orders, all launched by one call of ``launch.launch``::

    two passes   preprocess  ->  keys  ->  queries     lse2 and delta; dK and dV; dQ
                 queries  ->  keys                     the pass over queries makes lse2 and delta itself
    one pass     preprocess  ->  keys  ->  postprocess      dK, dV and dQ's sums; dQ out of the sums
    dS kept      preprocess  ->  keys  ->  sheet       dK, dV and dS; dQ of dS

How dQ is summed. With two passes each CTA of ``queries`` keeps its dQ in registers over all key blocks, so that every run gives the
same bits. With one pass every CTA of ``keys`` adds its part of dQ to fp32 sums in global memory; ``dq_accumulate`` decides the order:
``add_all`` adds in whatever order the CTAs come, ``add_in_order`` (``deterministic=True``) from the last key tile to the first. Where dS
is kept, ``sheet`` sums as ``queries`` does, of dS that ``keys`` has left behind.

To change one thing, edit one file:

=================================================== ==================================================================
tile sizes, registers                               tiles, a row of ``table.TABLE`` (no DSL)
which kernels a call gets, and which ship           config (no DSL)
P of a score, masks, softcap, dropout, dS           scores: ``probabilities``, ``score_gradients``
the gradient of a tensor that a score reads         dslopes, dlines, pair_bias; others: scores: ``score_gradients``; config: ``reasons``
the order of tiles, which blocks a tile visits      key_tiles, query_tiles; packed: packed_plan, sequences
CTAs of a launch, heads at work at a time           grids (no DSL)
key tiles that CTAs share                           parts; into how many parts: ``grids.tile_parts``
shared memory and barriers                          keys_storage, queries_storage, sheet
who loads and stores                                keys, queries, sheet
the products of a block, and what runs under what   keys_compute, keys_split, queries_compute, sheet
how dQ is accumulated, and in which order           dq_accumulate; put in place: postprocess
dS that is kept                                     sheet; of which heads and keys at a time: host/portions
lse2 and delta                                      preprocess; in the pass over queries: ``queries_compute.make_statistics``
a bias by pair: its tiles, and its gradient's       pair_bias
lse and delta that products subtract                subtrahends; their terms: preprocess
scores of head dims above 256, which two CTAs sum   halves
registers, products, shared-memory stores           fragments
the numbers of a launch                             parameters; by name in kernels: params, launch
=================================================== ==================================================================
"""
