"""QK-clip on the small GPT: scores above the threshold come down to it, and nothing else changes."""

import torch

from examples.gpt.model import GPT, GPTConfig
from examples.gpt.train import TrainConfig
from examples.qk_clip import WatchedAttention, qk_clip, train

SMALL = GPTConfig(layers=2, d_model=48, heads_q=4, heads_k=2, d_hidden=64, context=40)
TEXT = b"def tile(row, column):\n    return row * column\n" * 40


def test_the_scores_of_a_head_above_the_threshold_come_down_to_it_and_no_other_changes():
    watched = WatchedAttention()
    model = GPT(SMALL, watched)
    with torch.no_grad():
        for n, block in enumerate(model.blocks.parameters()):
            block.mul_(8 + n % 3)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(3))
    model(tokens)
    first, threshold = watched.max_logits[0].clone(), float(watched.max_logits[0].median())
    qk_clip(model, watched.max_logits, threshold)
    watched.max_logits.clear()
    model(tokens)
    assert (first > threshold).any()
    assert (first < threshold).any()
    torch.testing.assert_close(watched.max_logits[0], first.clamp(max=threshold))


def test_training_with_the_clip_holds_the_scores_that_grow_without_it():
    config = TrainConfig(steps=5, context=40, batch_size=4, learning_rate=0.05)
    free = list(train(TEXT, config, None, SMALL))
    clipped = list(train(TEXT, config, free[-1].max_logit / 2, SMALL))
    assert free[0] == clipped[0]
    assert clipped[-1].loss < clipped[0].loss
    assert clipped[-1].max_logit < free[-1].max_logit
