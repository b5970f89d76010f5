"""Attention over ranks that failed with an error of Python's own, where context parallelism of other libraries takes causal masks alone."""

import pytest
import torch

import tilewise as tw
from tests.parallel.ranks import CALLS, inputs
from tilewise.parallel import simulate

NAMES = ("causal-dense", "causal-blocks", "causal-ids", "window-table", "range-either")


@pytest.mark.parametrize("scheme", ["auto", "gather", "heads"])
@pytest.mark.parametrize("name", NAMES)
def test_context_parallel_an_interval_beside_a_mask_of_tensors_is_explained_prepared_and_right(name, scheme):
    q, k, v, _, _ = inputs()
    options = CALLS[name]()

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        mine = [parallel.shard(x) for x in (q, k, v)]
        said = tw.explain(*mine, parallel=parallel, **options)
        parallel.prepare(options["mask"])
        return said, parallel.unshard(tw.attention(*mine, parallel=parallel, **options))

    expected = tw.attention(q, k, v, **options)
    for said, o in simulate(2, one):
        assert said.scheme == scheme or scheme == "auto"
        torch.testing.assert_close(o, expected)
