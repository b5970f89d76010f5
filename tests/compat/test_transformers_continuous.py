"""tilewise.compat.transformers.continuous: ``generate_batch`` gives eager's tokens, and decodes over pages where layers allow it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from tests.compat.test_transformers import build, compat, hf, tokens, use
from tilewise.compat.transformers import continuous

NEW = 12
LENGTHS = (40, 3, 17, 26, 9, 1)  # beside a batch of 32 tokens: one prompt is read in parts while others decode
HEADS, HEADS_K, DIM, PAGE = 4, 2, 16, 4
needs_continuous = pytest.mark.skipif(
    compat.version() < compat.CONTINUOUS,
    reason=f"continuous batching needs transformers 5.24, here is {hf.__version__}",
)


@pytest.fixture
def paged_calls(monkeypatch) -> list[int]:
    """The number of sequences of each call over pages."""
    calls, run = [], continuous.over_pages

    def counted(q, k, v, starts, pages, **options):
        calls.append(len(starts[0]) - 1)
        return run(q, k, v, starts, pages, **options)

    monkeypatch.setattr(continuous, "over_pages", counted)
    return calls


@needs_continuous
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss"])
def test_continuous_batching_gives_eagers_tokens(name, paged_calls):
    model, prompts = build(name, eos_token_id=None), [tokens(n, batch=1) for n in LENGTHS]
    way = {"max_new_tokens": NEW, "do_sample": False}
    alone = [use(model, "eager").generate(p, **way)[0, p.shape[1] :].tolist() for p in prompts]
    found = use(model, "tilewise").generate_batch(
        [p[0].tolist() for p in prompts],
        generation_config=hf.GenerationConfig(**way, eos_token_id=-1),
        continuous_batching_config=hf.ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32),
    )
    assert [request.generated_tokens for request in found.values()] == alone
    assert model.config._attn_implementation == "tilewise"
    # transformers keeps a window's keys in a ring, which has no block table.
    assert bool(paged_calls) == (name in ("llama", "qwen3"))


@needs_continuous
def test_other_implementations_are_judged_as_before():
    from transformers.generation.continuous_batching import initialization

    model = use(build("llama"), "sdpa")
    assert not initialization.is_flash_attention_requested(model.config)
    assert initialization.is_flash_attention_requested(requested_attention_implementation="flash_attention_2")
    assert not initialization.is_flash_attention_requested(
        requested_attention_implementation="flash_attention_2", version=3
    )
    config = hf.ContinuousBatchingConfig(max_blocks_per_request=8)
    initialization.ensure_decode_fast_path_is_available(model.config, config, False)
    assert config.max_blocks_per_request == 0


def sequences(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """Queries of all sequences in a row, and each sequence's own q, k, v with its old keys."""
    draw = torch.Generator().manual_seed(0)
    shapes = [((n, HEADS), (n + o, HEADS_K), (n + o, HEADS_K)) for n, o in zip(new, old, strict=True)]
    parts = [tuple(torch.randn(*shape, DIM, generator=draw) for shape in each) for each in shapes]
    return torch.cat([q for q, _, _ in parts]), parts


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def handed(*rows: torch.Tensor, **keywords) -> torch.Tensor:
    """transformers' call of a causal layer with one row of packed sequences."""
    layer = SimpleNamespace(is_causal=True)
    ignored = {"read_index": [], "write_index": [], "logits_indices": rows[0], "logits_processor_args": rows[0]}
    return compat.attention(layer, *(x.transpose(0, 1)[None] for x in rows), None, **keywords, **ignored)[0][0]


@pytest.mark.parametrize("window", [None, 3])
def test_packed_queries_sit_at_the_end_of_longer_keys(window):
    q, parts = sequences(new=(3, 1, 5), old=(4, 6, 0))
    k, v = (torch.cat([part[n] for part in parts]) for n in (1, 2))
    both = {"cu_seq_lens_q": starts((3, 1, 5)), "cu_seq_lens_k": starts((7, 7, 5))}
    found = handed(q, k, v, **both, sliding_window=window, block_table=None)
    mask = tw.causal() if window is None else tw.window(left=window - 1, right=0)
    alone = torch.cat([tw.attention(*(x[None] for x in part), mask=mask)[0] for part in parts])
    torch.testing.assert_close(found, alone)


def test_decoding_over_pages_passes_over_the_padding_of_a_graph():
    old, padding = (4, 6, 0), 2
    _, parts = sequences(new=(1, 1, 1), old=old)
    pools = torch.full((2, 8, PAGE, HEADS_K, DIM), torch.nan)
    table = torch.full((len(old) + padding, 2), -1, dtype=torch.int32)
    table[:3] = torch.tensor([[5, 2], [1, 7], [3, 0]])
    for row, length, part in zip(table, old, parts, strict=False):
        for j, pool in itertools.product(range(length), (0, 1)):
            pools[pool, row[j // PAGE], j % PAGE] = part[1 + pool][j]
    last = [torch.stack([part[n][-1] for part in parts]) for n in range(3)]
    rows = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in last]
    lengths_k = [n + 1 for n in old] + [0] * padding
    both = {"cu_seq_lens_q": starts([1] * 3 + [0] * padding), "cu_seq_lens_k": starts(lengths_k)}
    found = handed(*rows, **both, block_table=table, k_cache=pools[0], v_cache=pools[1])
    alone = torch.cat([tw.attention(*(x[None] for x in part))[0] for part in parts])
    torch.testing.assert_close(found[:3], alone)
    assert torch.equal(found[3:], torch.zeros(padding, HEADS, DIM))


@pytest.mark.parametrize("wrong", ["output_attentions", "position_bias"])
def test_what_pages_cannot_honour_is_refused_with_the_reason(wrong):
    rows = [torch.zeros(1, heads, DIM) for heads in (HEADS, HEADS_K, HEADS_K)]
    pages = {"block_table": torch.zeros(1, 1), "k_cache": rows[1], "v_cache": rows[2]}
    value = True if wrong == "output_attentions" else torch.zeros(1, HEADS, 1, 1)
    with pytest.raises(ValueError, match=f"cu_seq_lens_q was passed together with {wrong}"):
        handed(*rows, cu_seq_lens_q=starts([1]), cu_seq_lens_k=starts([1]), **pages, **{wrong: value})
