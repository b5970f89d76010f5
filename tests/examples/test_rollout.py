"""The recipe of one bit pattern: both passes of a policy agree, and only with it."""

import torch

from examples import rollout


def test_sampled_and_trained_log_probabilities_are_equal_bit_for_bit():
    steps = rollout.train("everywhere", 2)
    assert [(step.different, step.most) for step in steps] == [(0, 0.0)] * 2


def test_without_it_they_differ():
    assert rollout.train(None, 1)[0].different


def test_a_row_of_a_product_does_not_depend_on_the_others():
    x, w = torch.randn(9, 48), torch.randn(20, 48)
    assert torch.equal(rollout.linear(x, w)[4:5], rollout.linear(x[4:5], w))


def test_the_backward_is_that_of_a_product():
    x, w = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    assert torch.autograd.gradcheck(rollout.linear, (x, w))
