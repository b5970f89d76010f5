"""The two examples that differentiate in other ways: a generator with forward mode in its loss, and forces with a second derivative."""

import torch

from examples import forces, meanflow


def test_meanflows_loss_holds_the_networks_own_derivative_and_trains_all_of_it():
    torch.manual_seed(0)
    before = [x.clone() for x in meanflow.Velocity().parameters()]
    network, losses = meanflow.train(steps=3, batch=32, seconds=60)
    assert all(loss == loss for loss in losses)
    assert all((x != y).any() for x, y in zip(network.parameters(), before, strict=True))
    z, r, t = (x.double() for x in (torch.randn(3, 2), torch.rand(3), torch.rand(3)))
    step, along, network = (
        1e-4,
        (torch.randn(3, 2).double(), torch.zeros(3).double(), torch.ones(3).double()),
        network.double(),
    )
    moved = torch.func.jvp(network, (z, r, t), along)[1]
    ends = [network(*[x + sign * step * d for x, d in zip((z, r, t), along, strict=True)]) for sign in (1, -1)]
    torch.testing.assert_close(moved, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def test_forces_are_learned_by_differentiating_twice():
    network, losses = forces.train(steps=25, batch=16, seconds=60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    x, _ = forces.draw(2)
    torch.testing.assert_close(forces.forces(network, x).sum(1), torch.zeros(2, 3), rtol=0, atol=1e-4)  # nobody pushes
