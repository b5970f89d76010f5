"""dQ, dK and dV on Hopper (sm_90a); the mathematics is docs/algorithm.md#6-backward.

Which kernels run is one record, :class:`~tilewise.backends.hopper.backward.config.Backward`, chosen by ``config.choose``. They run in
one of these orders, all launched by one call of ``launch.launch``::

    two passes   preprocess  ->  keys  ->  queries     lse2 and delta; dK and dV; dQ
                 queries  ->  keys                     the pass over queries makes lse2 and delta itself
    one pass     preprocess  ->  keys  ->  postprocess      dK, dV and dQ's sums; dQ out of the sums
                 preprocess  ->  cluster  ->  postprocess   the same for head_dim 256, two CTAs to a key tile

How dQ is summed. With two passes each CTA of ``queries`` keeps its dQ in registers over all key blocks, so that every run gives the
same bits. With one pass every CTA of ``keys`` adds its part of dQ to fp32 sums in global memory; ``dq_accumulate`` decides the order:
``add_all`` adds in whatever order the CTAs come, ``add_in_order`` (``deterministic=True``) in the order of the key tiles. At head_dim 256
``cluster_dq`` adds, some columns at a time.

To change one thing, edit one file:

=================================================== ==================================================================
tile sizes, registers, which kernels a call gets    config, tiles (no DSL); a row of config's TABLE
P of a score, masks, softcap, dropout, dS           scores: ``probabilities``, ``score_gradients``
the gradient of a tensor that a score reads         dslopes, dlines, pair_bias; others: scores: ``score_gradients``; config: ``reasons``
the order of tiles, which blocks a tile visits      key_tiles, query_tiles; packed: sequences
CTAs of a launch, heads at work at a time           grids (no DSL)
shared memory and barriers                          keys_storage, cluster_storage, queries_storage
who loads and stores                                keys, cluster, queries
the products of a block, and what runs under what   keys_compute, keys_split, cluster_compute, cluster_dq, queries_compute
how dQ is accumulated, and in which order           dq_accumulate; head_dim 256: cluster_dq; put in place: postprocess
lse2 and delta                                      preprocess; in the pass over queries: ``queries_compute.make_statistics``
a bias by pair: its tiles, and its gradient's       pair_bias
lse and delta that products subtract                subtrahends; their terms: preprocess
scores of head dims above 256, which two CTAs sum   halves
registers, products, shared-memory stores           fragments
the numbers of a launch                             params, launch; stand-ins to compile for: fake_arguments
=================================================== ==================================================================
"""
