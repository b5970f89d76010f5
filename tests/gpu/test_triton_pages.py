"""Decoding over pages on a GPU, with the splits that are chosen and with others."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from bench.testing import paged_call, wrong
from tests.backends.paged import Case, normal, tree
from tilewise import cache as caches
from tilewise.backends.triton import Triton
from tilewise.backends.triton.paging import choose_paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Around the end of a tile of 64 keys, and lengths of which programs have parts; behind each sequence lies NaN.
PLAIN = Case(64, (0, 1, 63, 64, 65, 700, 1030, 2500), 1, lambda: {"causal": True}, (8, 2), (128, 128), torch.bfloat16)
CASES = {
    "plain": PLAIN,
    "window-sink": replace(PLAIN, rows=3, options=lambda: {"mask": tw.window(300, 0), "sink": normal(8, seed=3)}),
    "softcap-alibi": replace(
        PLAIN,
        rows=2,
        options=lambda: {"causal": True, "score": tw.softcap(2.0) >> tw.alibi(normal(8, 8, seed=4))},
    ),
    "tree": replace(PLAIN, lengths=(30, 4, 170, 1000), rows=4, options=lambda: {"mask": tw.keep(tree)}),
    "packed": replace(PLAIN, rows=(1, 0, 3, 1, 1, 1, 2, 1)),
    "float16-d64": replace(PLAIN, rows=2, dims=(64, 64), dtype=torch.float16),
    "deterministic": replace(PLAIN, rows=2, options=lambda: {"causal": True, "deterministic": True}),
    "d96-dv32": replace(PLAIN, dims=(96, 32)),
    "pages-of-128": replace(PLAIN, page_size=128, rows=2),
    "alone": replace(PLAIN, lengths=(2047,)),
    "many": replace(PLAIN, lengths=tuple(37 * n * n % 1500 for n in range(70))),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_decoding_agree_with_the_oracle_and_repeat_their_bits(name):
    q, cache, options = CASES[name].draw()
    c = paged_call(q, cache, "cuda", **options)
    chosen = choose_paged(c.p, {})
    for config in (chosen, replace(chosen, splits=4, split=128)):
        first, again = (Triton(config).forward(c.p, c.t) for _ in range(2))
        assert [str(e) for e in c.expected().judge({"o": first.o, "lse": first.lse}) if not e.ok] == []
        assert torch.equal(first.o, again.o)
        assert torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("scales", ["", "heads", "sequences", "tokens"])
def test_the_kernel_that_appends_writes_what_torch_writes(scales):
    case = Case(16, (200, 3, 0, 31), dims=(64, 64), dtype=torch.bfloat16, scales=scales)
    k, v = (normal(4, 5, 2, 64, dtype=torch.bfloat16, seed=seed).cuda() for seed in (0, 1))
    one, other = (type(cache)(*(x.cuda() for x in cache)) for cache in (case.cache(), case.cache()))
    write = Triton().appender(one, k, v, None)
    write(one, k, v, None)
    caches._write(other, k, v, None)
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scales", ["", "heads"])
@pytest.mark.parametrize("options", [{"mask": tw.keep(tree)}, {"causal": True}], ids=["tree", "causal"])
def test_latent_attention_of_drafted_tokens_agrees_with_the_oracle(options, scales):
    case = Case(
        64, (130, 4, 1000), rows=4, heads=(16, 1), dims=(576, 512), dtype=torch.bfloat16, latent=True, scales=scales
    )
    q, cache, _ = case.draw()
    c = paged_call(q, cache, "cuda", **options)
    assert not wrong(Triton(), c)
