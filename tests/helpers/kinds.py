"""Spaces of every kind, and what agents see in them and learn from. Axes: P agents, B = T * S steps of S sequences."""

import gymnasium as gym
import numpy as np
import torch

from evorl.envs.spaces import choices
from evorl.networks.stack import padded
from evorl.types.batches import RecurrentInput
from helpers.support import algorithm, batch_of

CONVOLUTIONS = "network.convolutions=[{channels: 6, kernel: 4, stride: 2}, {channels: 8, kernel: 3}]"
OBSERVATIONS = {
    "image": gym.spaces.Box(0, 255, (2, 12, 12), np.uint8),
    "channels last": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8),
    "rows and columns": gym.spaces.Box(0, 255, (12, 11), np.uint8),
    "floating image": gym.spaces.Box(0.0, 1.0, (1, 11, 12)),
    "number": gym.spaces.Box(-1.0, 1.0, ()),
    "table": gym.spaces.Box(-1.0, 1.0, (3, 2)),
    "bytes": gym.spaces.Box(0, 255, (5,), np.uint8),
    "category": gym.spaces.Discrete(4, start=2),
    "categories": gym.spaces.MultiDiscrete([3, 2, 4]),
    "flags": gym.spaces.MultiBinary((2, 3)),
    "dict": gym.spaces.Dict(
        camera=gym.spaces.Box(0, 255, (12, 12), np.uint8),
        arm=gym.spaces.Dict(angles=gym.spaces.Box(-1.0, 1.0, (4,))),
        mode=gym.spaces.Discrete(3),
    ),
    "tuple": gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2, 3)), gym.spaces.Discrete(4))),
}
ACTIONS = {
    "one": gym.spaces.Discrete(3),
    "choices": gym.spaces.MultiDiscrete([3, 2]),
    "continuous": gym.spaces.Box(np.array([0.0, -2.0], np.float32), np.array([4.0, 2.0], np.float32)),
}


def made(name, *overrides, **spaces):
    """An algorithm for these spaces, with convolutions that are small enough for their images."""
    sizes = ["rollout_steps=16", "sequence_length=4", *(["batch_size=8"] if name == "ppo" else [])]
    numbers = [] if name == "dqn" else [f"algorithm.{size}" for size in sizes]
    settings = f"algorithm={{name: {name}}}", CONVOLUTIONS, "network.hidden_sizes=[16, 12]", *numbers
    return algorithm(*settings, *overrides, **spaces)


def shown(interface, agents, size, generator):
    """What agents see [P, B, ...], at random, with a mask where there is one; some episodes begin."""
    seen = {"started": torch.rand(agents, size, generator=generator) < 0.3}
    for name, part in interface.parts.items():
        shape = (agents, size, *part.shape)
        if part.kind == "categories":
            columns = [torch.randint(count, (agents, size), generator=generator) for count in part.sizes]
            seen[name] = torch.stack(columns, -1).view(shape)
        elif part.dtype == torch.uint8:
            seen[name] = torch.randint(256, shape, generator=generator).to(torch.uint8)
        else:
            seen[name] = torch.randn(shape, generator=generator)
    if interface.masked:
        masks = [torch.rand(agents, size, count, generator=generator) < 0.5 for count in choices(interface.action)]
        for mask in masks:
            mask[..., 0] |= ~mask.any(-1)
        seen["action_mask"] = torch.cat(masks, -1)
    return seen


def rollout_batch(algorithm, agents, size=6, length=1, seed=0):
    """A random batch of `size` sequences of `length` steps; recurrent agents begin with a random state."""
    generator = torch.Generator().manual_seed(seed)
    count, steps = len(agents), size * length
    seen = shown(algorithm.interface, count, steps, generator)
    started = seen.pop("started").view(count, length, size)

    def numbers():
        return torch.randn(count, steps, generator=generator)

    head = algorithm.distribution.heads[0].outputs
    outputs = {"action": torch.randn(count, steps, head, generator=generator), "log_scale": torch.zeros(1, 1, head)}
    unclipped = algorithm.distribution.sample(outputs, seen.get("action_mask"), generator)
    fields = {f"observation.{name}": values for name, values in seen.items()}
    fields |= {"unclipped_action": unclipped, "log_prob": -1.5 + 0.3 * numbers(), "value": numbers()}
    fields |= {"advantage": numbers(), "return": numbers()}
    state = random_state(algorithm, agents, size, generator)
    recurrent = None if state is None else RecurrentInput(state, started)
    return batch_of(fields, torch.full((count, steps), 1 / steps), torch.ones(count), recurrent)


def act(learner, look, state, deterministic=False):
    """What agents do when they are shown this, and the recurrent state after it."""
    seen = {name: value for name, value in look.items() if name != "started"}
    return learner.policy.act(seen, look["started"], state, deterministic)


def random_state(algorithm, agents, size, generator):
    """Random recurrent states [P, S, K, N], zero beyond each agent's own units; None without recurrence."""
    ((name, spec),) = algorithm.networks.items()
    numbers, units = spec.network.recurrent_shape(agents[0].architectures[name])
    if not units:
        return None
    most = padded(max(agent.architectures[name].recurrent_size for agent in agents))
    state = torch.zeros(len(agents), size, numbers, most)
    for index, agent in enumerate(agents):
        own = state[index, ..., : agent.architectures[name].recurrent_size]
        own.copy_(0.5 * torch.randn(own.shape, generator=generator))
    return state
