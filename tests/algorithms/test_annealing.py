"""The annealed learning rate is the configured one in the first rollout and above 0 in the last."""

import pytest
import torch
from helpers.support import trained

from evorl.algorithms.a2c import A2C


@pytest.mark.parametrize("name", ["a2c", "ppo, batch_size: 8", "impala"])
def test_the_learning_rate_falls_from_rollout_to_rollout(name, monkeypatch):
    rates, annealed = [], A2C.learning_rate

    def noted(self, stack):
        rates.append(annealed(self, stack).clone())
        return rates[-1]

    monkeypatch.setattr(A2C, "learning_rate", noted)
    trained(
        f"algorithm={{name: {name}, annealing: true, rollout_steps: 8}}",
        "environment={id: CartPole-v1, num_envs: 2}",
        "network.hidden_sizes=[8]",
        "training.max_steps=64",
        steps=32,
    )
    rates = torch.stack(rates)
    assert rates[0].tolist() == pytest.approx([1e-2, 1e-2])
    assert (rates.diff(dim=0) <= 0).all()
    # The last of four rollouts has a quarter of the rate, or more where steps were spent on resets.
    assert ((rates[-1] >= 0.25e-2 - 1e-6) & (rates[-1] < 0.5e-2)).all()
