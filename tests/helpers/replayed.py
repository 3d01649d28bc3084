"""Actors and critics written plainly, one agent at a time, to hold stacks of them against. Axes: B batch."""

import gymnasium as gym
import numpy as np
import torch
from torch.nn.functional import relu

from evorl.evolution import mutation as operations
from evorl.seeding import torch_generator
from helpers.kinds import shown
from helpers.support import agent, batch_of, check_stacks_equal_singles

RATE = 1e-2


def generator():
    """One that draws what a population of `helpers.support` draws."""
    return torch_generator(0, generation=0, rank=0, purpose="test")


def perceptron(p, parts, head, copy=None):
    """Two hidden layers and a head, in `copy` where heads have layers of their own."""

    def own(name):
        return p[name] if copy is None else p[name][copy]

    x = sum(value @ own(f"hidden.0.weight.{name}") for name, value in parts.items()) + own("hidden.0.bias")
    x = relu(relu(x) @ own("hidden.1.weight") + own("hidden.1.bias"))
    return x @ p[f"{head}.weight"] + p[f"{head}.bias"]


def features(p, observation):
    """Compute the output of the last of two hidden layers."""
    x = relu(observation @ p["hidden.0.weight.observation"] + p["hidden.0.bias"])
    return relu(x @ p["hidden.1.weight"] + p["hidden.1.bias"])


def deviation(z, offset, initial):
    """The standard deviation of theta^T z, written as in the paper."""
    return (z.square() @ (offset + initial).exp().square() + 1e-6).sqrt()


def twin_values(p, observation, action=None):
    """What both critics say [B] of an action, or [B, A] of all choices."""
    parts = {"observation": observation} | ({} if action is None else {"action": action})
    return [perceptron(p, parts, head, copy).squeeze(-1) for copy, head in enumerate(("first", "second"))]


class Single:
    """One agent's networks as plain tensors, with an optimiser for each."""

    def __init__(self, member):
        self.hparams = member.hyperparameters
        self.p = {
            name: {key: value.clone().requires_grad_() for key, value in roles["parameters"].items()}
            for name, roles in member.tensors.items()
        }
        self.target = {
            name: {key: value.clone() for key, value in roles["target"].items()}
            for name, roles in member.tensors.items()
            if "target" in roles
        }
        rates = dict.fromkeys(self.p, self.hparams["learning_rate"])
        rates["actor"] = self.hparams.get("actor_learning_rate", rates["actor"])
        self.adam = {name: torch.optim.Adam(list(p.values()), rates[name]) for name, p in self.p.items()}

    def descend(self, name, loss):
        self.adam[name].zero_grad()
        loss.backward()
        self.adam[name].step()

    def follow(self, *names):
        for name in names:
            for key, value in self.target[name].items():
                value += self.hparams["tau"] * (self.p[name][key].detach() - value)

    def check(self, trained):
        """Check that an agent that a learner gave has come to the same."""
        for name, p in self.p.items():
            plain = {key: value.detach() for key, value in p.items()}
            torch.testing.assert_close(trained.tensors[name]["parameters"], plain, rtol=1e-4, atol=1e-5)
        for name, target in self.target.items():
            torch.testing.assert_close(trained.tensors[name]["target"], target, rtol=1e-4, atol=1e-5)


def replayed_batch(algorithm, count, size=8, seed=0):
    """A random batch [P, B] of what `count` agents have done, their actions as the environment takes them."""
    draws, space = torch.Generator().manual_seed(seed), algorithm.interface.action
    if isinstance(space, gym.spaces.Discrete):
        actions = torch.randint(int(space.n), (count, size), generator=draws)
    else:
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        actions = low + (high - low) * torch.rand(count, size, *space.shape, generator=draws)
    fields = {
        "action": actions,
        "reward": torch.randn(count, size, generator=draws),
        "terminated": torch.rand(count, size, generator=draws) < 0.2,
    }
    for prefix in ("observation.", "next_observation."):
        looks = shown(algorithm.interface, count, size, draws)
        fields |= {prefix + name: value for name, value in looks.items() if name != "started"}
    return batch_of(fields, torch.full((count, size), 1 / size), torch.ones(count))


def family(algorithm):
    """Agents whose actors and critics have other sizes each, with other hyperparameters."""
    rates = [RATE * (index + 1) for index in range(4)]
    members = [agent(id=id, dqn=algorithm, learning_rate=rate, tau=0.1 + rate) for id, rate in enumerate(rates)]
    rng = np.random.default_rng(0)
    operations.enlarge(members[1], algorithm.networks, "actor", "hidden.0", 40, rng)
    operations.add_layer(members[2], algorithm.networks, "critics", "hidden.1", rng)
    operations.enlarge(members[3], algorithm.networks, "critics", "hidden.0", 20, rng)
    return members


def check_family(algorithm, batches):
    """`check_stacks_equal_singles` of agents whose actors and critics have other sizes each."""
    look = {"observation": torch.randn(4, 3, 5)}
    check_stacks_equal_singles(family(algorithm), algorithm, batches, look, rtol=1e-4, atol=1e-5)
