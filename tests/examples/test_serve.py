"""Serving many prompts over one paged cache gives each the answer that it gets alone."""

import pytest
import torch

from examples.gpt.model import GPT, GPTConfig
from examples.serve import PagePool, Request, Server, one_at_a_time

CONFIG = GPTConfig(layers=2, d_model=48, heads_q=4, heads_k=2, d_hidden=64, context=64)
BEGINNING = b"a tile is a row and a column, "
PROMPTS = (BEGINNING + b"one", BEGINNING + b"two", b"x", BEGINNING[:12], BEGINNING, BEGINNING + b"one")
COUNTS = (9, 4, 12, 7, 1, 6)


def small_gpt():
    """A GPT whose weights are large enough that attention matters to what it says."""
    model = GPT(CONFIG, attention=None)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    return model


@pytest.mark.parametrize(("num_pages", "page_size"), [(60, 4), (14, 4), (8, 16), (60, 1)])
def test_answers_are_those_of_one_request_at_a_time(num_pages, page_size):
    model = small_gpt()
    num_pages *= 4 if page_size == 1 else 1
    requests = [Request(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    server = Server(model, num_pages, page_size)
    server.run(requests)
    assert [bytes(r.said) for r in requests] == one_at_a_time(model, requests)
    assert sorted(server.pool.free) == list(range(num_pages))
    assert not server.pool.page_of
    assert not server.pool.prefix_of


def test_shared_prefixes_are_computed_once():
    requests = [Request(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    server = Server(small_gpt(), 60, 4)
    server.run(requests)
    shared = {1: 28, 3: 8, 4: 28, 5: 32}  # whole pages of what an earlier prompt begins with, short of the last byte
    alone = sum(len(p) + n - 1 for p, n in zip(PROMPTS, COUNTS, strict=True))
    assert server.computed == alone - sum(shared.values())


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="more than the context or all pages hold, 64"):
        Server(small_gpt(), 60, 4).run([Request(b"x" * 60, 5)])


def test_a_page_goes_back_when_its_last_user_leaves():
    pool = PagePool(10, 4)
    one, two = Request(b"abcdefgh", 4), Request(b"abcdefghij", 2)
    assert pool.admit(one)
    assert pool.admit(two)
    assert (two.cached, two.pages[:2]) == (8, one.pages[:2])
    pool.release(one)
    assert set(two.pages).isdisjoint(pool.free)
    pool.release(two)
    assert len(pool.free) == 10
