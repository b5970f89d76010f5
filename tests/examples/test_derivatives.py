"""The two examples that differentiate in other ways: a generator with forward mode in its loss, and forces with a second derivative."""

import torch

from examples import forces, meanflow


def test_meanflow_learns_and_its_loss_holds_the_networks_own_derivative():
    network, losses = meanflow.train(steps=30, batch=32, seconds=60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert meanflow.sample(network, 7).shape == (7, 2)
    z, r, t = torch.randn(3, 2), torch.rand(3), torch.rand(3)
    step, along = 1e-3, (torch.randn(3, 2), torch.zeros(3), torch.ones(3))
    moved = torch.func.jvp(network, (z, r, t), along)[1]
    ends = [network(*[x + sign * step * d for x, d in zip((z, r, t), along, strict=True)]) for sign in (1, -1)]
    torch.testing.assert_close(moved, (ends[0] - ends[1]) / (2 * step), rtol=2e-2, atol=2e-2)


def test_forces_are_learned_by_differentiating_twice():
    network, losses = forces.train(steps=25, batch=16, seconds=60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    x, _ = forces.draw(2)
    torch.testing.assert_close(forces.forces(network, x).sum(1), torch.zeros(2, 3), rtol=0, atol=1e-4)  # nobody pushes
