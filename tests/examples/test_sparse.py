"""Sparse attention that learns: the indexer follows the attention without changing it, and blocks are chosen where they match."""

import pytest
import torch

import tilewise as tw
from bench.testing import normal
from examples.gpt.model import GPTConfig
from examples.gpt.train import TrainConfig
from examples.sparse import BLOCK, IndexedAttention, best_blocks, block_attention, by_cubes, train_language, train_video

SMALL = GPTConfig(layers=1, d_model=32, heads_q=2, heads_k=1, d_hidden=32, context=48)
TEXT = b"def tile(row, column):\n    return row * column\n" * 40


def test_the_indexer_does_not_change_the_dense_model_and_then_chooses():
    config = TrainConfig(steps=4, context=48, batch_size=2, learning_rate=0.01, warmup_steps=1)
    steps = list(train_language(TEXT, config, SMALL, 6, 2))
    assert [x.dense == x.sparse for x in steps] == [True, True, False, False]
    assert [x.held is None for x in steps] == [False, False, True, True]
    assert steps[-1].sparse < steps[0].sparse


def test_the_indexer_learns_the_attention_of_its_layer():
    torch.manual_seed(0)
    q, k, v = (2 * normal(2, 48, heads, 16, seed=n) for n, heads in enumerate((2, 1, 1)))
    attend = IndexedAttention(SMALL, 6)
    optimizer = torch.optim.AdamW(attend.indexers.parameters(), lr=0.05, weight_decay=0.0)
    divergences = []
    for _ in range(30):
        attend.losses.clear()
        torch.testing.assert_close(attend(q, k, v), tw.attention(q, k, v, causal=True))
        attend.losses[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        divergences.append(attend.losses[0].item())
    assert divergences[-1] < 0.7 * divergences[0]
    assert attend.held[-1] > attend.held[0]


def test_blocks_are_chosen_where_keys_match_queries():
    match = torch.eye(4).repeat_interleave(BLOCK, 0).view(1, 4 * BLOCK, 1, 4)
    assert best_blocks(match, match.roll(BLOCK, 1), 1).flatten().tolist() == [1, 2, 3, 0]


def test_all_blocks_are_dense_attention_and_few_are_not():
    q, k, v = normal(3, 1, 4 * BLOCK, 2, 8).unbind()
    torch.testing.assert_close(block_attention(4)(q, k, v), tw.attention(q, k, v))
    for dense, sparse in train_video(2, (4, 8, 8), 4):
        assert dense == pytest.approx(sparse, rel=1e-5)


def test_a_cube_of_pixels_is_a_block():
    place = torch.arange(8 * 8 * 4.0).view(1, 4, 8, 8)
    cube = by_cubes(place)[0, :BLOCK, 0].view(4, 4, 4)
    assert torch.equal(cube, place[0, :4, :4, :4])
